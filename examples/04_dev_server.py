"""Run a server inside: start it, wait until it answers, talk to it, read its log, stop it."""

import asyncio
import urllib.request

import sandkeep

ASK = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/').read().decode())"


def fetch(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return str(answer.read().decode())


async def main() -> None:
    async with sandkeep.create_sandbox(ports=[8000]) as box:
        await box.fs.write_text("site/index.html", "<h1>hello</h1>")
        server = await box.create_process(
            "python3", ["-u", "-m", "http.server", "8000", "--directory", "site"]
        )
        async with server:
            print("ready:", (await server.stdout.readline()).decode().split(" (")[0])
            page = await box.run_process("python3", ["-c", ASK], check=True, capture_output=True)
            print("page:", page.stdout_text.strip())
            print("log:", (await server.stderr.text().readline()).split('"')[1])
            print("from outside:", await asyncio.to_thread(fetch, box.url(8000)))
        await server.terminate()
        print("ended with", await server.wait(timeout=10))


if __name__ == "__main__":
    asyncio.run(main())
