#!/usr/bin/env python3
"""Verify attention over reference bundles under compute-sanitizer: every tool, every form, every bundle.

usage: sanitize.py TEST_VERIFY_ATTN BUNDLE_FOLDER [--tools memcheck,racecheck,...] [--forms naive,flash,portable]
                   [--only TEXT] [--but LOG] [--share N] [--jobs N] [--seconds N] [--log FOLDER] [--libraries FOLDER]

Processes of `--share` bundles, `--jobs` at a time; dear bundles have a process of their own, start first, and run
without the naive slot beside the fast one, which form naive covers. A line for each tool, form and bundle: PASS, FAIL
or SKIP (not started within the seconds), its process's time and the tool's own count of errors. --but leaves out what
passed in LOG, the lines of an earlier call on the same library. TREEVERIFY_CUDA_LIB names the library; form portable
is flash with bf16 bundles in the kernel that runs on every device.
Exit status: 0 when every one passed, 1 when one failed or was left out.
"""

import argparse
import concurrent.futures
import glob
import itertools
import os
import re
import signal
import subprocess
import sys
import time

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
DEAR = 1e6  # cost of a bundle that has a process of its own
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) ")


def cost(path):
    """Work of a bundle, from its name."""
    heads, prefix, budget = map(int, re.search(r"_h(\d+)_p(\d+)_b(\d+)", path).groups())
    return heads * (prefix + budget) * budget


def run_name(tool, form, path):
    return f"{tool} {form} {os.path.basename(path)}"


def passed_in(log):
    """Names of the runs that passed in an earlier call's lines."""
    if not log:
        return set()
    with open(log, encoding="utf-8") as lines:
        return {" ".join(line.split()[1:4]) for line in lines if line.startswith("PASS ")}


def groups(paths, most):
    """Bundles that share a process, whose start costs as much as many of them; the dear ones are alone."""
    cheap = [path for path in paths if cost(path) < DEAR]
    several = [cheap[i:i + most] for i in range(0, len(cheap), most)]
    return several + [[path] for path in paths if cost(path) >= DEAR]


def run(job, args, end):
    """The lines to print, and how many bundles passed."""
    tool, form, paths = job
    names = [run_name(tool, form, path) for path in paths]
    left = end - time.monotonic()
    if left < 1:
        return [f"SKIP {name}: no time left" for name in names], 0
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", args.program, *paths, "--backend", "cuda"]
    if form != "naive":
        command += ["--flash", "--alone"] if cost(paths[0]) >= DEAR else ["--flash"]
    if tool == "initcheck":
        command.append("--unfilled")  # poison would count as written
    env = dict(os.environ, TREEVERIFY_CUDA_PORTABLE="1" if form == "portable" else "0")
    if args.libraries:
        env["LD_LIBRARY_PATH"] = args.libraries
    began = time.monotonic()
    # a group of its own: the tool and the program below it end together
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          start_new_session=True, env=env) as process:
        try:
            text = process.communicate(timeout=left)[0]
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, code = process.communicate()[0], "no end"
    seconds = time.monotonic() - began
    found = SUMMARY.search(text)
    ok = code == 0 and found is not None and found.group(1) == "0"
    if args.log and not ok:
        with open(os.path.join(args.log, names[0].replace(" ", "_") + ".log"), "w", encoding="utf-8") as log:
            log.write(text)
    what = f"{seconds:.1f} s for {len(paths)}: {found.group(0) if found else code}"
    return [f"{'PASS' if ok else 'FAIL'} {name} {what}" for name in names], len(names) if ok else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("bundles")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--forms", default="naive,flash,portable")
    parser.add_argument("--only", default="", help="only bundles whose name matches this expression")
    parser.add_argument("--but", metavar="LOG", help="leave out what passed there")
    parser.add_argument("--share", type=int, default=8, help="bundles of a process")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--libraries", help="folder of the program's shared libraries")
    parser.add_argument("--log", help="folder for what a tool printed that found something")
    args = parser.parse_args()
    if args.log:
        os.makedirs(args.log, exist_ok=True)
    paths = [p for p in sorted(glob.glob(os.path.join(args.bundles, "*.kdtr"))) if re.search(args.only, p)]
    paths.sort(key=cost)
    tools, done, jobs = args.tools.split(","), passed_in(args.but), []
    for tool, form in itertools.product(tools, args.forms.split(",")):
        mine = [path for path in paths if form != "portable" or "_bf16" in path]
        mine = [path for path in mine if run_name(tool, form, path) not in done]
        jobs += [(tool, form, group) for group in groups(mine, args.share)]
    jobs.sort(key=lambda job: -max(map(cost, job[2])))
    end = time.monotonic() + args.seconds
    passed, wanted = dict.fromkeys(tools, 0), dict.fromkeys(tools, 0)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(run, job, args, end): job for job in jobs}
        for future in concurrent.futures.as_completed(running):
            lines, ok = future.result()
            passed[running[future][0]] += ok
            print("\n".join(lines), flush=True)
    for job in jobs:
        wanted[job[0]] += len(job[2])
    print("clean: " + ", ".join(f"{tool} {passed[tool]} of {wanted[tool]}" for tool in tools))
    return 0 if jobs and passed == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
