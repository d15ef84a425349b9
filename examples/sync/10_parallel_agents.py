"""Many agents at once, each in a sandbox of its own, sharing one client: threads instead of tasks."""

from concurrent.futures import ThreadPoolExecutor

from sandkeep import sync as sandkeep


def agent(client: sandkeep.Client, number: int) -> int:
    with client.create_sandbox(persistent=False) as box:
        script = f"print(sum(range({number} * 1000)))"
        done = box.run_process("python3", ["-c", script], check=True, capture_output=True)
        return int(done.stdout_text)


def main() -> None:
    with sandkeep.Client() as client, ThreadPoolExecutor(8) as threads:
        results = list(threads.map(agent, [client] * 8, range(1, 9)))
    print("results:", results)


if __name__ == "__main__":
    main()
