"""A headless Chromium through chromedriver: plain WebDriver over HTTP, no library.

    with Browser() as browser:                    # raises Missing where Debian's chromium, chromium-driver are not
        browser.open("http://127.0.0.1:8472/")
        browser.run("return document.title")

Waits are for a condition, with a generous end; every message of the console is kept.
"""

import base64
import http.client
import json
import os
import shutil
import subprocess
import tempfile
import time

WAIT_S = 120


class Missing(Exception):
    """The browser or its driver is not installed."""


class Failed(AssertionError):
    """The driver refused."""


class Browser:
    def __init__(self):
        self.chrome = shutil.which("chromium") or shutil.which("chromium-browser")
        driver = shutil.which("chromedriver")
        if self.chrome is None or driver is None:
            raise Missing("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
        self.folder = tempfile.TemporaryDirectory()
        home = dict(os.environ, HOME=self.folder.name)
        self.driver = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=home
        )
        self.session = None

    def __enter__(self):
        try:
            self.port = self.find_port()
            arguments = ["--headless=new", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage", "--no-first-run",
                         "--disable-background-networking", f"--user-data-dir={self.folder.name}/profile"]
            # root may not have the sandbox, and without user namespaces nobody; only pages of our own are shown
            arguments.append("--no-sandbox")
            capabilities = {
                "browserName": "chrome",
                "goog:loggingPrefs": {"browser": "ALL"},
                "goog:chromeOptions": {"binary": self.chrome, "args": arguments},
            }
            made = self.call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
            self.session = f"/session/{made['sessionId']}"
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def find_port(self):
        for line in self.driver.stdout:
            if "started successfully on port" in line:
                return int(line.split("on port")[1].strip(" .\n"))
        raise Failed("chromedriver did not start")

    def __exit__(self, kind, value, trace):
        try:
            if self.session is not None:
                self.call("DELETE", self.session)
        finally:
            self.driver.terminate()
            self.driver.wait(timeout=60)
            self.driver.stdout.close()
            self.folder.cleanup()

    def call(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        data = None if method != "POST" else json.dumps(body or {})
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        value = json.loads(answer.read())["value"]
        connection.close()
        if answer.status != 200:
            raise Failed(f"{method} {path}: {value.get('error')}: {value.get('message', '')[:500]}")
        return value

    def open(self, url):
        self.call("POST", self.session + "/url", {"url": url})

    def run(self, script, *arguments):
        return self.call("POST", self.session + "/execute/sync", {"script": script, "args": arguments})

    def wait(self, script, what):
        """Until the expression is true; returns its value."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            value = self.run("return " + script)
            if value:
                return value
            time.sleep(0.1)
        raise Failed(f"waited for: {what}")

    def find(self, selector):
        found = self.call("POST", self.session + "/element", {"using": "css selector", "value": selector})
        return self.session + "/element/" + next(iter(found.values()))

    def type(self, selector, text):
        self.call("POST", self.find(selector) + "/value", {"text": text})

    def click(self, selector):
        self.call("POST", self.find(selector) + "/click")

    def devtools(self, command, **params):
        return self.call("POST", self.session + "/goog/cdp/execute", {"cmd": command, "params": params})

    def screen(self, width, height, is_phone=False):
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )

    def scheme(self, name):
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def shot(self, path):
        """The whole page as a picture."""
        data = self.devtools("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def console(self):
        """Messages since the last call: [(level, text)]."""
        return [(m["level"], m["message"]) for m in self.call("POST", self.session + "/se/log", {"type": "browser"})]
