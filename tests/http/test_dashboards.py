"""deploy/grafana and deploy/prometheus against what a daemon really exports.

Every metric, label and label value that a dashboard or a rule names is in a scrape of the shipped daemon; with
promtool (Debian: prometheus) every expression is parsed and the alerts are run on made-up series.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest

import yaml
from harness import Caller
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


class DashboardsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with RealDaemon("--pages", "64") as daemon:
            caller = Caller(daemon, admin=True)
            first = caller.call("GET", "/metrics")  # the first one is an answer that the second counts
            assert first.status == 200
            cls.names = sample_names(parse(caller.call("GET", "/metrics").body.decode()))
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

    def run_promtool(self, *words):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    if shutil.which("promtool") is None:
        print("promtool is not installed (Debian: prometheus): the expressions are not parsed, the alerts not run")
    unittest.main(verbosity=1)
