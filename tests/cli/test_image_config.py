"""What an image's author configured is shown, and runs when nobody names a command."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from sandkeep import sync
from tests.cli.program import Program
from tests.host.test_images_registry import running_registry
from tests.server.server_process import ServerProcess
from tests.server.test_images import runnable

SECOND = 1_000_000_000


def test_an_images_configuration_is_shown_and_applied(
    local: Program, server: ServerProcess, name: str, tmp_path: Path
) -> None:
    made = runnable(**{"srv/app/note": b"hello"})
    made.config = {
        "Entrypoint": ["/bin/sh", "-c"],
        "Cmd": ["cat note; echo $WORD $PWD"],
        "Env": ["WORD=from the image"],
        "WorkingDir": "/srv/app",
        "User": "1234",
        "ExposedPorts": {"8080/tcp": {}},
        "Volumes": {"/data": {}},
        "StopSignal": "SIGINT",
        "Healthcheck": {"Test": ["CMD", "true"], "Interval": 5 * SECOND, "Retries": 3},
        "Labels": {"org.example": "yes"},
    }
    bare = runnable()
    with running_registry(str(tmp_path / "registry"), password=False) as registry:
        registry.push(name, "1", made)
        registry.push(name, "bare", bare)
        reference = f"{registry.address}/{name}"
        ran = local("run", "--image", f"{reference}:1")
        said = local.fails("run", "--image", f"{reference}:bare", status=2)
    assert ran.out == b"hellofrom the image /srv/app\n"
    assert "no entrypoint and no command" in said
    with sync.Client(f"unix://{server.socket}") as client:
        found = {image.names[0]: image for image in client.images.list() if image.names}
        config = found[f"{reference}:1"].config
    assert config.argv == ("/bin/sh", "-c", "cat note; echo $WORD $PWD")
    assert (config.cwd, config.user, config.env) == ("/srv/app", "1234", {"WORD": "from the image"})
    assert (config.ports, config.volumes, config.stop_signal) == (("8080/tcp",), ("/data",), "SIGINT")
    assert config.healthcheck is not None
    assert (config.healthcheck.test, config.healthcheck.interval) == (("CMD", "true"), timedelta(seconds=5))
    assert config.labels == {"org.example": "yes"}
    assert found[f"{reference}:bare"].config == sync.AuthorConfig()
    for tag in ("1", "bare"):
        local("images", "rm", f"{reference}:{tag}")
