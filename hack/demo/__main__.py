"""``make demo`` and ``make demo SCENE=NAME``; ``KEEP=1`` leaves everything running until Ctrl-C.

Exit code 0 only if every promise was checked and kept.
"""

import os
import signal
import sys
import time

from app import processes
from hack.cluster import ClusterFailed, NotUsable
from hack.cluster.binaries import BuildFailed
from hack.controller import ControllerFailed
from hack.demo.billing import bill
from hack.demo.scenes import SCENES
from hack.demo.stage import Stage, Unmet, set_up


def main() -> int:
    wanted = os.environ.get("SCENE") or "main"
    names = list(SCENES) if wanted == "all" else [wanted]
    if unknown := [name for name in names if name not in SCENES]:
        print(f"no scene {unknown[0]!r}; there are: {', '.join(SCENES)}, all", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scratch = processes.Scratch("demo", need_bytes=512 * 2**20)
    log = scratch.path / "controller" / "nebula.log"
    try:
        with set_up(scratch.path) as stage:
            began = time.monotonic()
            for name in names:
                SCENES[name](stage)
            bill(stage)
            print(f"\nAll of it was checked. The scenes took {time.monotonic() - began:.0f} s.", flush=True)
            if os.environ.get("KEEP"):
                _keep(stage)
        return 0
    except (Unmet, ControllerFailed, ClusterFailed, NotUsable, BuildFailed) as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        if log.exists():
            print(f"the controller's log ends:\n{processes.tail(log, lines=30)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    finally:
        scratch.close()


def _keep(stage: Stage) -> None:
    print("\nIt goes on until Ctrl-C:")
    print(f"  export KUBECONFIG={stage.cluster.kubeconfig} NEBULA_DATABASE_URL={stage.database}")
    for cloud in stage.clouds.values():
        print(f"  {cloud.name}'s own books: curl -s {cloud.url}/sim/truth")
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    sys.exit(main())
