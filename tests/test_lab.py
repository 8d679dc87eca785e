"""JupyterLab as `make lab` starts it: it opens at the guide, and notebooks run in this environment's kernel through its API."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid

import pytest
import websocket

from lib import paths

TOKEN = "of-this-test"
QUICK = "99_verdicts"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a headless JupyterLab, with everything it writes in a folder of its own."""
    folder = tmp_path_factory.mktemp("lab")
    names = ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR")
    own = {name: str(folder / name.lower()) for name in names}
    own |= {"LOOPED_OUTPUTS": str(folder / "outputs"), "PYTHONPATH": str(paths.ROOT)}
    options = ["--no-browser", "--port=0", f"--IdentityProvider.token={TOKEN}", "--allow-root", "--ip=127.0.0.1"]
    with open(folder / "said", "w") as said:
        command = [sys.executable, "-m", "lib", "lab", *options]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | own,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + 120
        while not (files := list((folder / "jupyter_runtime_dir").glob("jpserver-*.json"))) or not files[0].read_text():
            assert process.poll() is None and time.monotonic() < until, (folder / "said").read_text()
            time.sleep(0.2)
        about = json.loads(files[0].read_text())
        yield about["url"]
        ask(about["url"], "api/shutdown", "POST")
        assert process.wait(timeout=60) == 0, (folder / "said").read_text()
        assert not list((folder / "jupyter_runtime_dir").glob("kernel-*.json")), "a kernel outlives its server"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def ask(url, path, method="GET", body=None):
    """What the server answers, from JSON."""
    request = urllib.request.Request(url + path, method=method, headers={"Authorization": f"token {TOKEN}"})
    request.data = None if body is None else json.dumps(body).encode()
    for attempt in range(50):
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read() or "null")
        except ConnectionRefusedError:
            time.sleep(0.2 * (attempt < 49))
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError) or attempt == 49:
                raise
            time.sleep(0.2)
    raise AssertionError("no answer")


def run(channel, code):
    """Execute one cell over the kernel's channel; returns the error it raised, or None."""
    number = uuid.uuid4().hex
    header = {"msg_id": number, "msg_type": "execute_request", "session": "test", "username": "", "version": "5.3", "date": ""}
    content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": True}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell", "buffers": []}
    channel.send(json.dumps(message))
    raised = None
    while True:
        told = json.loads(channel.recv())
        if told["parent_header"].get("msg_id") != number:
            continue
        if told["msg_type"] == "error":
            raised = f"{told['content']['ename']}: {told['content']['evalue']}"
        if told["msg_type"] == "status" and told["content"]["execution_state"] == "idle":
            return raised


def test_it_opens_at_the_guide(server):
    with urllib.request.urlopen(f"{server}?token={TOKEN}", timeout=60) as page:
        assert page.url.split("?")[0].endswith("/lab/tree/notebooks/00_reading_guide.ipynb") and page.status == 200
    guide = ask(server, "api/contents/notebooks/00_reading_guide.ipynb")
    assert guide["type"] == "notebook" and guide["content"]["metadata"]["kernelspec"]["name"] == "python3"


def test_a_notebook_runs_cell_by_cell_in_this_environments_kernel(server):
    book = ask(server, f"api/contents/notebooks/{QUICK}.ipynb")["content"]
    wanted = {"path": f"notebooks/{QUICK}.ipynb", "name": QUICK, "type": "notebook", "kernel": {"name": "python3"}}
    session = ask(server, "api/sessions", "POST", wanted)
    address = f"{server.replace('http', 'ws', 1)}api/kernels/{session['kernel']['id']}/channels?token={TOKEN}"
    channel = websocket.create_connection(address, timeout=120)
    try:
        assert run(channel, f"import sys; assert sys.executable == {sys.executable!r}, sys.executable") is None
        cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
        assert len(cells) > 2
        for i, cell in enumerate(cells, 1):
            assert run(channel, cell) is None, f"code cell {i}"
        assert run(channel, "raise KeyError('told')") == "KeyError: 'told'"
    finally:
        channel.close()
        ask(server, f"api/sessions/{session['id']}", "DELETE")
    assert ask(server, "api/sessions") == []
