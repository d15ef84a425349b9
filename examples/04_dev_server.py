"""Run a server inside: start it, wait until it answers, talk to it, read its log, stop it."""

import asyncio

import sandkeep

ASK = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/').read().decode())"


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
            print("from outside it has the port in its name:", "8000" in box.url(8000))
        await server.terminate()
        print("ended with", await server.wait(timeout=10))


if __name__ == "__main__":
    asyncio.run(main())
