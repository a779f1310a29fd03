"""Notes that an interpreter has started, for the table `recovery`; on the path of its processes alone."""

import os

if "BENCH_STAMPS" in os.environ:
    import json
    import time

    with open("/proc/self/stat", encoding="utf-8") as stat, open("/proc/uptime", encoding="utf-8") as uptime:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
        age = float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    with open(os.environ["BENCH_STAMPS"], "a", encoding="utf-8") as file:
        now = time.time()
        file.write(
            json.dumps({"what": "born", "at": now - age}) + "\n" + json.dumps({"what": "started", "at": now}) + "\n"
        )
