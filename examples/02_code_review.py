"""Review code without trusting it: send a tree, check it inside, fetch the report."""

import asyncio
import json
import tempfile
from pathlib import Path

import sandkeep

CHECK = """
import ast, json, pathlib
found = []
for path in sorted(pathlib.Path("project").rglob("*.py")):
    try:
        tree = ast.parse(path.read_text())
    except SyntaxError as error:
        found.append({"file": str(path), "line": error.lineno, "problem": error.msg})
        continue
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "eval":
            found.append({"file": str(path), "line": node.lineno, "problem": "eval of something"})
pathlib.Path("report.json").write_text(json.dumps(found))
"""


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        project = Path(directory, "project")
        project.mkdir()
        (project / "good.py").write_text("print('fine')\n")
        (project / "bad.py").write_text("print('broken'\n")
        (project / "ugly.py").write_text("x = 1\nprint(eval('x'))\n")

        nothing = sandkeep.NetworkPolicy.deny_all()
        async with sandkeep.create_sandbox(network_policy=nothing, persistent=False) as box:
            sent = await box.fs.upload(project, "project", ignore=["__pycache__", ".git"])
            print(f"sent {sent.files} files")
            await box.run_process("python3", ["-c", CHECK], check=True)
            for finding in json.loads(await box.fs.read_text("report.json")):
                print(f"{finding['file']}:{finding['line']}: {finding['problem']}")


if __name__ == "__main__":
    asyncio.run(main())
