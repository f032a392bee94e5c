"""A certificate authority of the test's own, made with the openssl program: nothing of it is kept in the tree."""

import os
import ssl
import subprocess


def openssl(*arguments, data=None):
    done = subprocess.run(["openssl", *arguments], input=data, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"openssl {arguments[0]}: {done.stderr}")
    return done.stdout


class Authority:
    """Its certificate is `ca`. Every pair it issues is for 127.0.0.1, ::1 and localhost."""

    def __init__(self, folder, name="ca"):
        self.folder, self.issued = folder, 0
        self.ca, self.key = self.path(f"{name}.pem"), self.path(f"{name}.key")
        self.make_key(self.key)
        openssl("req", "-x509", "-new", "-key", self.key, "-out", self.ca, "-subj", f"/CN={name}", "-days", "30",
                "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign")

    def path(self, name):
        return os.path.join(self.folder, name)

    def make_key(self, path, kind="EC", *options):
        options = options or (("ec_paramgen_curve:P-256",) if kind == "EC" else ("rsa_keygen_bits:2048",))
        given = [word for option in options for word in ("-pkeyopt", option)]
        openssl("genpkey", "-algorithm", kind, *given, "-out", path)

    def issue(self, name, days=20, kind="EC", options=(), signer=None):
        """(certificate, key): NAME.pem and NAME.key of the folder. The number is new every time."""
        self.issued += 1
        cert, key, request, extra = (self.path(f"{name}.{end}") for end in ("pem", "key", "csr", "ext"))
        self.make_key(key, kind, *options)
        is_ca = name.startswith("between")
        with open(extra, "w") as file:
            file.write("basicConstraints=critical,CA:TRUE\n" if is_ca else
                       "subjectAltName=IP:127.0.0.1,IP:::1,DNS:localhost\nextendedKeyUsage=serverAuth\n")
        by_cert, by_key = signer or (self.ca, self.key)
        openssl("req", "-new", "-key", key, "-out", request, "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", request, "-CA", by_cert, "-CAkey", by_key, "-out", cert, "-extfile", extra,
                "-days", str(days), "-set_serial", str(1000 + self.issued))
        return cert, key

    def context(self, oldest=None, newest=None):
        """A client that trusts this authority alone."""
        context = ssl.create_default_context(cafile=self.ca)
        if oldest is not None:
            context.minimum_version = oldest
        if newest is not None:
            context.maximum_version = newest
        return context


def serial(cert):
    return int(openssl("x509", "-in", cert, "-noout", "-serial").strip().partition("=")[2], 16)


def not_after_s(cert):
    return ssl.cert_time_to_seconds(openssl("x509", "-in", cert, "-noout", "-enddate").strip().partition("=")[2])
