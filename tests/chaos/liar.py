"""A clock that lies: a preloaded library, built here, so that a process and its TLS believe a wrong time."""

import shutil
import subprocess
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long offset(void) {
    const char *text = getenv("CLOCK_OFFSET_S");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, at);
    if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += offset();
    return result;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


def built(folder: Path) -> Path | None:
    """The library, which adds CLOCK_OFFSET_S to the time of day; None without a C compiler here."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    (folder / "liar.c").write_text(_SOURCE)
    library = folder / "liar.so"
    argv = [compiler, "-shared", "-fPIC", "-O1", "-o", library, folder / "liar.c", "-ldl"]
    subprocess.run(argv, check=True)
    return library


def options(library: Path, off_s: int) -> dict[str, str]:
    """What a controller is started with, to be so far ahead."""
    return {"LD_PRELOAD": str(library), "CLOCK_OFFSET_S": str(off_s)}
