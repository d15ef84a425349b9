"""Network policies, routes and drives."""

from __future__ import annotations

import json
import os
import time
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

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


async def fetch(box: Any, host: str, path: str = "/echo", *options: str) -> str:
    """What a sandbox gets from the server on loopback under one of its names; nothing if it is not let."""
    url = f"http://{host}:{os.environ['WEB_PORT']}{path}"
    done = await box.run_process("curl", ["-s", "-m", "60", *options, url], capture_output=True)
    return str(done.stdout)


@scenario
async def policy_of_domains(bench: Bench) -> Any:
    policy = api.NetworkPolicy
    async with bench.box(network_policy=policy.custom({"one.test": []})) as box:
        seen = {"allowed": await fetch(box, "one.test"), "other": await fetch(box, "two.test")}
        subnets = api.NetworkPolicySubnets(deny=["127.0.0.0/8"])
        await box.update_network_policy(policy.custom({"one.test": []}, subnets=subnets))
        seen["denied_range"] = await fetch(box, "one.test")
        await box.update_network_policy(policy.deny_all())
        return {**seen, "live": await fetch(box, "one.test")}


@scenario
async def policy_of_requests(bench: Bench) -> Any:
    match = api.NetworkPolicyRequestMatcher(path=api.NetworkPolicyMatcher.starts_with("/echo/v1"))
    change = api.NetworkPolicyTransform(headers={"x-injected": "by the policy"})
    rule = api.NetworkPolicyRule(match=match, transform=[change])
    async with bench.box(network_policy=api.NetworkPolicy.custom({"one.test": [rule]})) as box:
        return {
            "matched": await fetch(box, "one.test", "/echo/v1"),
            "other": await fetch(box, "one.test", "/echo/v2"),
        }


@scenario
async def policy_answers(bench: Bench) -> Any:
    match = api.NetworkPolicyRequestMatcher(path=api.NetworkPolicyMatcher.exact("/tea"))
    answer = api.NetworkPolicyResponse(status_code=418, body="no tea", content_type="text/plain")
    rule = api.NetworkPolicyRule(match=match, response=answer)
    async with bench.box(network_policy=api.NetworkPolicy.custom({"one.test": [rule]})) as box:
        return {
            "answer": await fetch(box, "one.test", "/tea", "-w", " %{http_code}"),
            "other": await fetch(box, "one.test"),
        }


@scenario
async def routes(bench: Bench) -> Any:
    async with bench.box(ports=[3000]) as box:
        await box.fs.write_text("page", "through the route\n")
        await box.create_process("python3", ["-m", "http.server", "3000"])
        return {
            "ports": [route.port for route in box.routes],
            "urls": all(route.url.startswith("http") and route.subdomain for route in box.routes),
            "text": through(box.routes[0].url, "/page"),
        }


def through(url: str, path: str) -> str:
    """What a route leads to, once somebody listens there."""
    for _ in range(600):
        try:
            with urlopen(f"{url}{path}", timeout=60) as answer:
                return str(answer.read().decode())
        except HTTPError:
            time.sleep(0.1)
    return ""


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
