"""What deploy/ has for containers and Kubernetes, as far as it can be judged without either.

    deployment.py TREEVERIFYD TREEVERIFY SOURCE_ROOT

The options that are passed are options of the program, and what is not loopback has keys; the probes exist, need no
key and have the times that the manifest promises; the images are built from files that are there, from the one list of
packages, which has every library that the programs load, and run as nobody, without a shell around the daemon.
"""

import json
import os
import re
import subprocess
import sys
import tempfile

import yaml

DAEMON, CLIENT, ROOT = (os.path.abspath(path) for path in sys.argv[1:4])
PROBES = {"startupProbe": ("/readyz", 1800), "livenessProbe": ("/healthz", 30), "readinessProbe": ("/readyz", 10)}
INSTRUCTIONS = {"ARG", "FROM", "COPY", "RUN", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


def path(*parts):
    return os.path.join(ROOT, "deploy", *parts)


def packages(name):
    text = subprocess.run(["bash", "-c", f". {path('packages.sh')} && echo ${name}"], capture_output=True, text=True, check=True).stdout
    return set(text.split())


def settings(arguments):
    """What the daemon makes of these: {key: value}. Its files are this test's, with the same names of options."""
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(os.path.join(folder, "..2026"))  # as a secret is mounted: links, and the group may read
        os.symlink("..2026", os.path.join(folder, "..data"))
        keys = os.path.join(folder, "keys")
        os.symlink(os.path.join("..data", "keys"), keys)
        with open(keys, "w") as file:
            file.write("someone:verify:a-secret-of-16-bytes\n")
        os.chmod(keys, 0o440)
        arguments = [re.sub(r"/run/secrets/\S+", keys, argument) for argument in arguments]
        env = {name: value for name, value in os.environ.items() if not name.startswith("TREEVERIFY_")}
        done = subprocess.run([DAEMON, *arguments, "--print-config"], capture_output=True, text=True, env=env)
        assert done.returncode == 0, (arguments, done.stderr)
        bare = [argument for argument in arguments if keys not in argument and "api-key-file" not in argument]
        refused = subprocess.run([DAEMON, *bare, "--print-config"], capture_output=True, text=True, env=env)
        assert refused.returncode == 78 and "api_key_file" in refused.stderr, "an open listener needs keys"
    return dict(re.findall(r"^(\w+) = (.*)$", done.stdout, re.M))


def port(address):
    return int(address.rsplit(":", 1)[1])


def check_manifest():
    with open(path("kubernetes", "treeverify.yaml"), encoding="utf-8") as file:
        documents = {document["kind"]: document for document in yaml.safe_load_all(file)}
    pod = documents["StatefulSet"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    got = settings(container["args"])
    ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
    assert ports == {"work": port(got["listen"]), "admin": port(got["listen_admin"])}, ports
    with open(os.path.join(ROOT, "proto", "openapi.yaml"), encoding="utf-8") as file:
        contract = yaml.safe_load(file)["paths"]
    for name, (target, seconds) in PROBES.items():
        probe = container[name]
        assert probe["httpGet"] == {"path": target, "port": "admin"}, probe
        assert contract[target]["get"]["security"] == [{}], "a probe has no key"
        assert probe["periodSeconds"] * probe["failureThreshold"] == seconds, probe
    assert int(got["drain_max_s"]) < pod["spec"]["terminationGracePeriodSeconds"]
    assert container["livenessProbe"]["timeoutSeconds"] == 5
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert set(mounts.values()) == volumes, (mounts, volumes)
    for wanted in (got["model"], got["state_dir"], os.path.dirname("/run/secrets/treeverify/keys")):
        assert wanted in mounts, wanted
    closed = container["securityContext"]
    assert closed["readOnlyRootFilesystem"] and closed["capabilities"] == {"drop": ["ALL"]}
    assert closed["allowPrivilegeEscalation"] is False and pod["spec"]["securityContext"]["runAsNonRoot"] is True
    # the user of the image, who reads the secret through its group and writes the volume through fsGroup
    user, group = (int(number) for number in dict(instructions("Dockerfile.cuda"))["USER"].split(":"))
    outer = pod["spec"]["securityContext"]
    assert (outer["runAsUser"], outer["runAsGroup"], outer["fsGroup"]) == (user, group, group), outer
    (secret,) = (volume["secret"] for volume in pod["spec"]["volumes"] if "secret" in volume)
    assert secret["defaultMode"] == 0o440, secret
    assert got["api_key_file"].endswith("/keys")
    assert container["image"] == "treeverify:cuda" and f"-t {container['image']} ." in head("Dockerfile.cuda")
    assert (got["backend"], container["resources"]["limits"]["nvidia.com/gpu"]) == ("cuda", 1), "one device a daemon"
    variables = {entry["name"] for entry in container.get("env", ())}
    with open(path("config", "OPTIONS.md"), encoding="utf-8") as file:
        assert variables <= set(re.findall(r"`(TREEVERIFY_\w+)`", file.read())), variables
    assert int(got["drain_grace_s"]) >= PROBES["readinessProbe"][1], "who drains serves until readiness has failed"
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(ports["admin"])
    service = documents["Service"]["spec"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] in ports


def head(name):
    with open(path("containers", name), encoding="utf-8") as file:
        return "".join(line for line in file if line.startswith("#"))


def instructions(name):
    with open(path("containers", name), encoding="utf-8") as file:
        text = re.sub(r"^#.*\n", "", file.read(), flags=re.M).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def check_image(name):
    """The last stage's settings are those that count."""
    found, built = {}, []
    for word, rest in instructions(name):
        assert word in INSTRUCTIONS, (name, word)
        if word == "FROM":
            found = {}
            built.append(re.search(r"\bAS (\w+)", rest))
        elif word == "COPY" and not rest.startswith("--from"):
            assert os.path.exists(os.path.join(ROOT, rest.split()[0])), (name, rest)
        elif word == "COPY":
            assert built[0] and rest.startswith(f"--from={built[0].group(1)} "), rest
        elif word in ("RUN", "ENTRYPOINT", "CMD"):
            found.setdefault(word, []).append(json.loads(rest))
        elif word == "HEALTHCHECK":
            found[word] = json.loads(rest[rest.index("CMD ") + 4:])
        else:
            found[word] = rest
    assert len(built) == 2, "what builds is not what runs"
    assert "tv_packages_install $tv_packages_run" in found["RUN"][0][2], "the one list of packages"
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", found["USER"]), "nobody's user"
    assert found["STOPSIGNAL"] == "SIGTERM" and found["ENTRYPOINT"] == [["treeverifyd"]]
    (arguments,) = found["CMD"]
    got = settings(arguments)
    assert set(map(int, found["EXPOSE"].split())) == {port(got["listen"]), port(got["listen_admin"])}
    command = found["HEALTHCHECK"]
    assert command[0] == "treeverify" and port(command[-1]) == port(got["listen_admin"])
    answered = subprocess.run([CLIENT, *command[1:-1], "http://127.0.0.1:9"], capture_output=True, text=True)
    assert answered.returncode == 69, (answered.returncode, answered.stderr)  # the discard port: nobody is there
    return got


def check_packages():
    """Debian alone: whose package each library is that the programs name themselves."""
    needed = set()
    for program in (DAEMON, CLIENT):
        text = subprocess.run(["readelf", "-d", program], capture_output=True, text=True, check=True).stdout
        needed |= set(re.findall(r"\(NEEDED\).*\[(.+)\]", text))
    listed, owners = packages("tv_packages_run"), {}
    for library in needed:
        done = subprocess.run(["dpkg-query", "-S", f"*/{library}"], capture_output=True, text=True)
        owners[library] = {line.split(":")[0] for line in done.stdout.splitlines()}
    for library, names in owners.items():
        apart = re.match(r"lib(asan|ubsan|tsan|treeverify)", library)  # sanitizers, and what is built here
        assert names & (listed | {"libc6", "libgcc-s1"}) or apart, f"{library} of {names} is not among tv_packages_run"
    return len(owners)


def check_readme():
    """Every package that is installed has its reason in the README."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        needs = file.read().split("\n## What it needs\n")[1].split("\n## ")[0]
    named = set(re.findall(r"[\w.+-]+", "".join(line.split("|")[1] for line in needs.splitlines() if line.startswith("| "))))
    with open(path("packages.sh"), encoding="utf-8") as file:
        lists = re.findall(r"^(tv_(?:packages|python)_\w+)=", file.read(), re.M)
    assert len(lists) >= 8, lists
    for name in lists:
        missing = {package.split("==")[0] for package in packages(name)} - named
        assert not missing, f"{name}: the README does not say what for: {missing}"


def main():
    check_manifest()
    check_readme()
    assert check_image("Dockerfile.cpu")["backend"] == "cpu"
    assert check_image("Dockerfile.cuda")["backend"] == "cuda"
    if os.path.exists("/etc/debian_version") and open("/etc/debian_version").read().startswith("12"):
        print(f"{check_packages()} libraries have their packages")


main()
