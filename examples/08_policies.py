"""Say what a sandbox may reach, with which credentials, and change it while it runs."""

import asyncio

import sandkeep
from sandkeep.policy import Matcher, NetworkPolicy, RequestMatch, Respond, Rule, Transform

REACH = "import urllib.request as r; r.urlopen('http://198.51.100.1/', timeout=2)"


async def main() -> None:
    policy = NetworkPolicy.custom(
        {
            "api.example.com": [
                Rule(Respond(403), RequestMatch(methods=("DELETE",))),
                Rule(
                    Transform.set_headers({"authorization": "Bearer secret"}),
                    RequestMatch(path=Matcher(starts_with="/v1/")),
                ),
            ],
            "*.example.org": [],
        },
        deny_subnets=["10.0.0.0/8"],
    )
    async with sandkeep.create_sandbox(network_policy=policy) as box:
        shown = box.network_policy
        assert shown is not None
        print("may reach:", ", ".join(shown.domains))
        print("never:", ", ".join(shown.deny_subnets))
        print("headers set, values never shown:", dict(shown.injected))

        await box.update(network_policy=NetworkPolicy.deny_all())
        session = box.current_session
        print("now:", session.network_policy.mode.value if session.network_policy else "?")
        tried = await box.run_process("python3", ["-c", REACH], capture_output=True)
        print("reached something:", tried.returncode == 0)


if __name__ == "__main__":
    asyncio.run(main())
