"""A target is first loaded in another process; one that ends this process is rejected."""

import pytest
from clika_ref_conformance.execution import target_probe
from clika_ref_conformance.execution.run import RunRequest, plan_run
from clika_ref_conformance.execution.target_probe import probe_target
from clika_ref_conformance.mutants.kill_rate import run_mutants

from clika_ref.core.errors import TargetError

TARGETS = """
import os, signal, time
from clika_ref_conformance.targets.identity import Identity
class Missing(Identity):
    def unavailable_reason(self): os._exit(0)
class Passes(Identity):
    def passes(self):
        print("no device", flush=True)
        os._exit(3)
class Crashing(Identity):
    def unavailable_reason(self): os.kill(os.getpid(), signal.SIGSEGV)
class Hanging(Identity):
    def unavailable_reason(self): time.sleep(1000)
class Unavailable(Identity):
    def unavailable_reason(self): return "install it"
"""

DECLARED = """
[[deviation]]
id = "ending"
operators = ["relu"]
replica = "ending:function"
reason = "what computes it ends the process"
link = "none: made up"
expires = "2999-01-01"
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "ending_targets.py").write_text(TARGETS)
    (tmp_path / "ending.py").write_text("import os\nos._exit(0)")
    (tmp_path / "declaring").mkdir()
    (tmp_path / "declaring" / "__init__.py").write_text(TARGETS)
    (tmp_path / "declaring" / "deviations.toml").write_text(DECLARED)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "ending:TARGET",
            r"cannot load the target ending:TARGET: its process ended with status 0\. Correct the target: its import",
        ),
        ("ending_targets:Missing", r"Missing: its process ended with status 0\. .* must return\.$"),
        ("ending_targets:Passes", r"ended with status 3\. .* Its output:\nno device$"),
        (
            "declaring:Identity",
            r"the target declaring:Identity: its process ended with status 0\. .* and replicas must",
        ),
        (
            "ending_targets:Crashing",
            r"(?s)with signal 11\. .*Fatal Python error: Segmentation fault.* in unavailable_reason\n",
        ),
    ],
)
def test_plan_run_target_ending_process_raises(module, text, message):
    """A target that ends the process is rejected before a run."""
    with pytest.raises(TargetError, match=message):
        plan_run(RunRequest(text))


@pytest.mark.slow
def test_run_mutants_target_ending_process_raises(module):
    """A target that ends the process is rejected before mutants are tried."""
    with pytest.raises(TargetError, match="its process ended"):
        run_mutants([], target="ending:TARGET")


def test_probe_target_hang_raises(module, monkeypatch):
    """A target that does not return is rejected."""
    monkeypatch.setattr(target_probe, "START_TIMEOUT_S", 0.1)
    with pytest.raises(
        TargetError, match=r"cannot load the target ending_targets:Hanging: its process did not end within 0\.1 s"
    ):
        probe_target("ending_targets:Hanging")


@pytest.mark.slow
def test_probe_target_unavailable_target_left_to_run(module):
    """A target that is unavailable with a reason is rejected by the run."""
    probe_target("ending_targets:Unavailable")
    with pytest.raises(TargetError, match="cannot use the target identity: install it"):
        plan_run(RunRequest("ending_targets:Unavailable"))
