"""Network policies, routes and drives."""

from __future__ import annotations

import json
from typing import Any

from vercel import sandbox as api  # type: ignore[import-not-found]

from tests.conformance.py.bench import Bench, refusal, scenario, sh


@scenario
async def network_policy(bench: Bench) -> Any:
    policy = api.NetworkPolicy
    rule = api.NetworkPolicyRule(
        match=api.NetworkPolicyRequestMatcher(
            path=api.NetworkPolicyMatcher.starts_with("/v1/"), method=["POST"]
        ),
        transform=[api.NetworkPolicyTransform(headers={"authorization": "hunter2"})],
    )
    custom = policy.custom(
        {"example.com": [], "api.x.com": [rule]},
        subnets=api.NetworkPolicySubnets(allow=["10.0.0.0/8"], deny=["10.1.0.0/16"]),
    )
    async with bench.box("open") as box, bench.box("shut", network_policy=policy.deny_all()) as shut:
        simple = [box.network_policy.mode, shut.network_policy.mode]
        live = await box.update_network_policy(policy.deny_all())
        fresh = await bench.client.get_sandbox(name=box.name)
        async with bench.box("custom", network_policy=custom) as limited:
            shown = limited.network_policy
            return {
                "simple": simple,
                "domains": list(shown.allowed_domains),
                "subnets": [list(shown.subnets.allow), list(shown.subnets.deny)],
                "secret_shown": "hunter2" in json.dumps(limited.raw),
                "live": live.network_policy.mode,
                "default_kept": fresh.network_policy.mode,
            }


@scenario
async def routes(bench: Bench) -> Any:
    async with bench.box(ports=[3000]) as box:
        return {
            "ports": [route.port for route in box.routes],
            "urls": all(route.url.startswith("http") and route.subdomain for route in box.routes),
        }


@scenario
async def drives(bench: Bench) -> Any:
    client, name = bench.client, bench.name("drive")
    drive, created = await client.get_or_create_drive(name=name)
    again, created_again = await client.get_or_create_drive(name=name)
    try:
        query = api.DriveQueryByName(name_prefix=bench.prefix)
        listed = [found.name async for found in client.query_drives(query=query)]
        async with bench.box("one", mounts={"/data": drive}) as box:
            await sh(box, "echo 'on the drive' > /data/file")
            attached = await refusal(client.create_sandbox(name=bench.name("two"), mounts={"/data": again}))
            await box.stop()
        async with bench.box("three", mounts={"/data": bench.at_once(drive.snapshot())}) as box:
            text = await sh(box, "cat /data/file")
    finally:
        deleted = await client.delete_drive(name=name)
    return {
        "created": created,
        "again_same": not created_again and again.id == drive.id,
        "listed": listed == [name],
        "text": text,
        "attached": attached,
        "deleted": deleted.name == name,
    }


@scenario
async def drive_fork(bench: Bench) -> Any:
    client, name, copy = bench.client, bench.name("drive"), bench.name("copy")
    drive, _ = await client.get_or_create_drive(name=name)
    async with bench.box(mounts={"/data": drive}) as box:
        await sh(box, "echo x > /data/file")
        await box.stop()
    forked = await client.fork_drive(source=name, name=copy)
    conflict = await refusal(client.fork_drive(source=name, name=copy))
    await client.delete_drive(name=copy)
    await client.delete_drive(name=name)
    return {
        "parent": forked.parent_drive_id == drive.id,
        "conflict": conflict,
        "missing": await refusal(client.fork_drive(source=name, name=copy)),
    }
