"""deploy/grafana and deploy/prometheus against what a daemon really exports.

Every metric, label and label value that a dashboard or a rule names is in a scrape of the shipped daemon. With
promtool (Debian: prometheus) that scrape is linted, every expression parsed, and the alerts run on made-up series. A
Prometheus that runs with the shipped configuration then scrapes the daemon itself, and every panel has something to show.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import unittest
import urllib.parse
import urllib.request

import yaml
from harness import Caller, round_body, verify_path
from metrics import parse
from real import RealDaemon

DEPLOY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "deploy")
BOARD = os.path.join(DEPLOY, "grafana", "treeverify.json")
RULES = os.path.join(DEPLOY, "prometheus", "treeverify.rules.yaml")
RULES_TEST = os.path.join(DEPLOY, "prometheus", "treeverify.rules_test.yaml")
CONFIG = os.path.join(DEPLOY, "prometheus", "prometheus.yaml")
# Prometheus's own: labels that it adds, and the series that it makes of a scrape.
ADDED_LABELS = {"job", "instance"}
ADDED_NAMES = {"up"}
NAME = re.compile(r"\b(?:(?:treeverify|process)_\w+|up)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
BY = re.compile(r"\b(?:by|ignoring|on)\s*\(([^)]*)\)")
LEGEND = re.compile(r"\{\{\s*\$?(?:labels\.)?(\w+)\s*\}\}")


def board():
    with open(BOARD, encoding="utf-8") as file:
        return json.load(file)


def rules():
    with open(RULES, encoding="utf-8") as file:
        return [rule for group in yaml.safe_load(file)["groups"] for rule in group["rules"]]


def expressions():
    """(where, expression, legend)"""
    document = board()
    for panel in document["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]
    for note in document["annotations"]["list"]:
        yield note["name"], note["expr"], note["titleFormat"]
    for variable in document["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            yield variable["name"], found.group(1), f"{{{{{found.group(2)}}}}}"
    for rule in rules():
        yield rule["alert"], rule["expr"], ""


def plain(expression):
    """As a data source sends it: the dashboard's variables have values."""
    text = expression.replace("$__rate_interval", "1m")
    return re.sub(r'"\$\w+"', '".*"', text)


def sample_names(families):
    """name of a sample -> {label: values}"""
    names = {}
    for family in families.values():
        for labels in family.samples:
            end = labels[0] if family.type == "histogram" else ""
            known = names.setdefault(family.name + end, {})
            for label, value in labels[1:] if end else labels:
                known.setdefault(label, set()).add(value)
    return names


def faults(expression, legend, names):
    """What the expression names that no scrape has."""
    found, labels, some = [], set(ADDED_LABELS), False
    for match in NAME.finditer(expression):
        name, some = match.group(0).split("{")[0], True
        if name not in names and name not in ADDED_NAMES:
            found.append(name)
            continue
        known = names.get(name, {})
        labels |= set(known)
        for label, operator, value in MATCHER.findall(match.group(1) or ""):
            if label in ADDED_LABELS:
                continue
            fits = (lambda v: re.fullmatch(value, v)) if "~" in operator else (lambda v: v == value)
            if not any(fits(v) for v in known.get(label, ())):
                found.append(f"{name}{{{label}{operator}{value}}}")
    if not some:
        found.append(f"no metric in {expression}")
    for group in BY.findall(expression):
        found += [label for label in re.split(r"[\s,]+", group.strip()) if label and label not in labels]
    found += [label for label in LEGEND.findall(legend) if label not in labels]
    return found


class Prometheus:
    """The server of the path, on a port of its own, with the shipped configuration: another target, seconds for minutes."""

    def __init__(self, daemon, folder):
        shutil.copy(RULES, folder)
        with open(CONFIG, encoding="utf-8") as file:
            config = yaml.safe_load(file)
        config["global"] = {name: "1s" for name in config["global"]}
        config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{daemon.admin_port}"]}]
        path = os.path.join(folder, "prometheus.yaml")
        with open(path, "w", encoding="utf-8") as file:
            yaml.safe_dump(config, file)
        self.log = os.path.join(folder, "log")
        command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder}/data", "--web.listen-address=127.0.0.1:0"]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder)

    def __enter__(self):
        end = time.monotonic() + 60
        found = None
        while found is None:
            with open(self.log, encoding="utf-8") as log:
                text = log.read()
            assert self.process.poll() is None and time.monotonic() < end, text
            found = re.search(r'msg="Listening on" address=(\S+)', text)
            time.sleep(0.1)
        self.url = f"http://{found.group(1)}/api/v1/"
        return self

    def __exit__(self, *reason):
        self.process.terminate()
        self.process.wait(timeout=60)

    def ask(self, what, **fields):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        query = "?" + urllib.parse.urlencode(fields) if fields else ""
        with opener.open(self.url + what + query, timeout=60) as answer:
            return json.load(answer)["data"]

    def query(self, expression):
        return self.ask("query", query=expression)["result"]


class DashboardsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with RealDaemon("--pages", "64") as daemon:
            caller = Caller(daemon, admin=True)
            first = caller.call("GET", "/metrics")  # the first one is an answer that the second counts
            assert first.status == 200
            cls.scrape = caller.call("GET", "/metrics").body.decode()
            cls.names = sample_names(parse(cls.scrape))
            caller.close()

    def test_every_name_is_exported(self):
        count = 0
        for where, expression, legend in expressions():
            self.assertEqual(faults(expression, legend, self.names), [], f"{where}: {expression}")
            count += 1
        self.assertGreater(count, 40)

    def test_the_check_bites(self):
        """Names that nothing exports are found, each kind of them."""
        for expression, legend in (
            ("rate(treeverify_rounds[5m])", ""),
            ("treeverify_round_seconds", ""),  # a histogram has no sample of its own name
            ('treeverify_kv_pages{state="lost"}', ""),
            ('treeverify_kv_pages{kind="free"}', ""),
            ("sum by (route) (treeverify_kv_pages)", ""),
            ("treeverify_kv_pages", "{{route}}"),
            ("1 + 1", ""),
        ):
            self.assertNotEqual(faults(expression, legend, self.names), [], expression)

    def test_the_board_is_whole(self):
        """Ids once, panels beside each other, one source for all, a row for each part of the design."""
        document = board()
        panels = document["panels"]
        self.assertEqual(len({panel["id"] for panel in panels}), len(panels))
        taken = set()
        for panel in panels:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            self.assertEqual(cells & taken, set(), panel["title"])
            self.assertLessEqual(at["x"] + at["w"], 24)
            taken |= cells
        rows = [panel["title"] for panel in panels if panel["type"] == "row"]
        self.assertEqual(
            rows, ["State", "Traffic", "Acceptance", "Latency by stage", "Pool", "Device faults and process", "Parity"]
        )
        sources = re.findall(r'"uid": "([^"]*)"', json.dumps(document))
        self.assertEqual(set(sources), {"treeverify", "${datasource}"})
        variables = {variable["name"] for variable in document["templating"]["list"]}
        used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
        self.assertEqual(used - variables, set())

    def test_alerts(self):
        """The six of the design, each with a severity and words for who is called."""
        alerts = rules()
        self.assertEqual(len({rule["alert"] for rule in alerts}), 6)
        for rule in alerts:
            self.assertIn(rule["labels"]["severity"], ("warning", "critical"))
            self.assertEqual(set(rule["annotations"]), {"summary", "description"})
        with open(CONFIG, encoding="utf-8") as file:
            config = yaml.safe_load(file)
        self.assertEqual([job["job_name"] for job in config["scrape_configs"]], ["treeverify"])
        self.assertEqual(config["rule_files"], [os.path.basename(RULES)])

    @unittest.skipUnless(shutil.which("promtool"), "promtool is not installed (Debian: prometheus)")
    def test_promtool(self):
        for words in (("check", "rules", RULES), ("test", "rules", RULES_TEST), ("check", "config", CONFIG)):
            self.run_promtool(*words)
        recorded = [
            {"record": f"board:number{number}", "expr": plain(expression)}
            for number, (_, expression, _) in enumerate(expressions())
        ]
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "board.yaml")
            with open(path, "w", encoding="utf-8") as file:
                yaml.safe_dump({"groups": [{"name": "board", "rules": recorded}]}, file)
            self.run_promtool("check", "rules", path)

    @unittest.skipUnless(shutil.which("promtool"), "promtool is not installed (Debian: prometheus)")
    def test_the_scrape_is_clean(self):
        """Names, types, help and units as Prometheus wants them; and the lint is one."""
        self.assertEqual(self.run_promtool("check", "metrics", text=self.scrape), "")
        done = subprocess.run(["promtool", "check", "metrics"], input="# TYPE a_total gauge\na_total 1\n", capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)

    @unittest.skipUnless(shutil.which("prometheus"), "prometheus is not installed")
    def test_a_prometheus_shows_it(self):
        """Its own targets, rules and answers: what each panel, legend and variable asks for is there, and no alert fires."""
        with RealDaemon("--pages", "64", "--shadow", "all") as daemon, tempfile.TemporaryDirectory() as folder:
            caller = Caller(daemon)
            self.addCleanup(caller.close)
            state = caller.call("POST", "/v1/sessions", {"tokens": [5, 6, 7]}).json
            with Prometheus(daemon, folder) as prometheus:
                end = time.monotonic() + 90
                while not prometheus.query('count_over_time(up{job="treeverify"}[1m]) >= 4'):
                    self.assertLess(time.monotonic(), end, "it does not scrape")
                    answer = caller.call("POST", verify_path(state), round_body(state, [40, 41], [0, 0]))
                    self.assertEqual(answer.status, 200, answer.body)
                    state.update(answer.json)
                    time.sleep(0.2)
                self.assertTrue(all(value["value"][1] == "1" for value in prometheus.query("up")))
                alerts = {rule["alert"] for rule in rules()}
                asked = [one for one in expressions() if one[0] not in alerts]
                self.assertGreater(len(asked), 30)
                for where, expression, legend in asked:
                    got = prometheus.query(re.sub(r" (> 0|!= 0)$", "", plain(expression)))  # also what has not happened
                    with self.subTest(where, expression=expression, legend=legend):
                        self.assertTrue(got)
                        for label in LEGEND.findall(legend):
                            self.assertTrue(all(label in one["metric"] for one in got), got)
                found = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
                self.assertEqual({(rule["name"], rule["health"]) for rule in found}, {(name, "ok") for name in alerts})
                self.assertNotIn("firing", [rule["state"] for rule in found])

    def run_promtool(self, *words, text=None):
        done = subprocess.run(["promtool", *words], input=text, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stderr + (done.stdout if text is not None else "")


if __name__ == "__main__":
    if shutil.which("promtool") is None:
        print("promtool is not installed (Debian: prometheus): the expressions are not parsed, the alerts not run")
    unittest.main(verbosity=1)
