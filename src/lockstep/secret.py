"""The secret of a job: proof that a launcher, a rank or a value belongs to it.

[Note: token] A launcher creates a token, or is given one, and passes it to its ranks in their environment
(LOCKSTEP_TOKEN). It is never in a store, on a command line or in a file that others may read. Keys for each purpose are
derived from it, so a proof for one purpose is invalid for another. Without a token, they are derived from nothing:
they distinguish what Lockstep wrote from what another program wrote, but anyone who knows Lockstep can make them.

[Note: seals] A value in a store travels with a MAC (HMAC) over the job, its key, its writer, its number among that
writer's values, and its text. So nobody else can write a value, move it to another key, or replace it by an older one
after a newer one was read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat

from lockstep import env
from lockstep.errors import SetupError

__all__ = [
    "Refused",
    "Seals",
    "Secret",
    "is_nonce",
    "new_nonce",
    "new_token",
    "read_token_file",
    "remarks_on",
    "secret_of_ranks",
    "token_for_ranks",
]

MAC_BYTES = 32
_NONCE_BYTES = 16
_SHORTEST_TOKEN = 16
_LARGEST_FILE_BYTES = 4096
_LARGEST_SEALED = 16 << 20
_HEX = frozenset("0123456789abcdef")


class Refused(Exception):
    """A stored value was not written by a holder of this job's token. The message is a clause."""


def new_token() -> str:
    """A token that nobody can guess: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def new_nonce() -> str:
    """A random word for one use: 32 hexadecimal digits."""
    return secrets.token_hex(_NONCE_BYTES)


def is_nonce(text: str) -> bool:
    """Whether a text from an unauthenticated peer has the form of `new_nonce`.

    >>> is_nonce(new_nonce()), is_nonce("none")
    (True, False)
    """
    return len(text) == 2 * _NONCE_BYTES and _HEX.issuperset(text)


class Secret:
    """A key and its uses. Its text is never shown.

    Args:
        token: the token that the members of a job share; None if they were given none.

    Attributes:
        is_given: whether there is a token.
    """

    __slots__ = ("_key", "is_given")

    def __init__(self, token: str | None) -> None:
        self.is_given = token is not None
        self._key = hashlib.sha256(b"lockstep token" + (token or "").strip().encode()).digest()

    def __repr__(self) -> str:
        return "Secret(given)" if self.is_given else "Secret(none)"

    def derive(self, *purpose: str) -> Secret:
        """The key for one purpose."""
        made = Secret(None)
        made.is_given = self.is_given
        made._key = self.mac(*(part.encode() for part in purpose))
        return made

    def as_token(self) -> str:
        """This key as a token, for ranks for which it was derived."""
        return self._key.hex()

    @property
    def name(self) -> str:
        """A name for this key in errors, which does not reveal it."""
        return self.mac(b"name").hex()[:8] if self.is_given else "none"

    def mac(self, *parts: bytes) -> bytes:
        """An HMAC-SHA256 of these parts and of where each ends, 32 bytes."""
        made = hmac.new(self._key, digestmod="sha256")
        for part in parts:
            made.update(len(part).to_bytes(8, "big") + part)
        return made.digest()

    def has_made(self, mac: bytes, *parts: bytes) -> bool:
        """Whether `mac` is the HMAC of these parts; takes the same time for any answer."""
        return hmac.compare_digest(mac, self.mac(*parts))


class Seals:
    """Adds MACs to values for one store, and checks them. See [Note: seals].

    Args:
        secret: the secret of the job.
        scope: what else the values belong to, such as the name of the job.
    """

    def __init__(self, secret: Secret, *scope: str) -> None:
        self.secret = secret
        self._key = secret.derive("seal", *scope)
        self._writer = secrets.token_hex(6)
        self._count = 0
        self._seen: dict[tuple[str, str], int] = {}

    def seal(self, key: str, text: str, count: int | None = None) -> str:
        """The value to put in the store, with its MAC.

        Args:
            key: its key in the store.
            text: the value.
            count: the number of changes of that key including this one, if several writers change it in turn.
        """
        writer = self._writer
        if count is None:
            self._count = count = self._count + 1
        else:
            writer = "all"
        head = f"{self.secret.name} {writer} {count}"
        return f"{head} {self._mac(key, head, text).hex()} {text}"

    def open(self, key: str, sealed: str) -> str:
        """The text of a value from the store.

        Raises:
            Refused: no member of this job wrote it there, or it is older than one read before.
        """
        parts = sealed.split(" ", 4) if len(sealed) <= _LARGEST_SEALED else []
        if len(parts) < 5:
            raise Refused("it has no MAC")
        name, writer, digits, mac, text = parts
        is_formed = digits.isascii() and digits.isdigit() and len(digits) <= 18
        if not is_formed or len(mac) != 2 * MAC_BYTES or not _HEX.issuperset(mac):
            raise Refused("it has no MAC")
        if not hmac.compare_digest(bytes.fromhex(mac), self._mac(key, f"{name} {writer} {digits}", text)):
            if name != self.secret.name and len(name) <= 8 and name.isalnum():
                raise Refused(f"it was made with another token ({name}) than is known here ({self.secret.name})")
            raise Refused("its MAC is wrong")
        count = int(digits)
        if count < self._seen.get((key, writer), 0):
            raise Refused("it is older than what was read before")
        self._seen[key, writer] = count
        return text

    def count_of(self, sealed: str) -> int:
        """The number of changes of its key up to a value that was opened before."""
        return int(sealed.split(" ", 3)[2])

    def _mac(self, key: str, head: str, text: str) -> bytes:
        return self._key.mac(*(part.encode(errors="surrogatepass") for part in (key, head, text)))


def token_for_ranks(given: str | None) -> str | None:
    """The token that the launcher of one host gives its ranks: derived from its own, or None if it has none.

    It never creates one. Ranks of one launcher meet in a private folder; independent launchers, whose ranks meet at an
    address in the script, would each create a different one.
    """
    return None if given is None else Secret(given).derive("ranks").as_token()


def secret_of_ranks() -> Secret:
    """The secret of the job that this rank belongs to."""
    return Secret(env.LOCKSTEP_TOKEN.get())


def remarks_on(token: str | None, place: str = "LOCKSTEP_TOKEN") -> list[str]:
    """Warnings about a token, which they do not reveal.

    Args:
        token: the token; None for none.
        place: where it comes from.
    """
    if token is None or len(token) >= _SHORTEST_TOKEN:
        return []
    return [f"the token in {place} has only {len(token)} characters, and can be guessed"]


def read_token_file(path: str) -> tuple[str, list[str]]:
    """The token in a file, which is created, readable only by this user, if it does not exist. Local.

    Hosts with a shared folder get one token by naming a file in it; otherwise, copy the file to every host.

    Args:
        path: path of the file.

    Returns:
        The token, and messages about the file to show to the user.

    Raises:
        SetupError: the file cannot be read or created, or does not contain a token.
    """
    path = os.path.expanduser(path)
    remarks: list[str] = []
    try:
        if _make_token_file(path):
            remarks.append(f"made {path}, with a token for this job: every host needs the same file")
        with open(path, "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise SetupError(f"token_file={path} is no file")
            data = file.read(_LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise SetupError(f"token_file={path} cannot be read or made: {error.strerror}") from None
    try:
        token = data.decode().strip()
    except UnicodeDecodeError:
        token = ""
    if not token or len(data) > _LARGEST_FILE_BYTES or not token.isprintable():
        raise SetupError(f"token_file={path} holds no token: a line of text, such as `openssl rand -hex 32` prints")
    if stat.S_IMODE(state.st_mode) & 0o077:
        remarks.append(f"others may read {path} (mode {stat.S_IMODE(state.st_mode):04o}): chmod 600 keeps it secret")
    return token, remarks + remarks_on(token, path)


def _make_token_file(path: str) -> bool:
    """Create the file with a new token unless it exists, atomically; returns whether it was created here."""
    if os.path.lexists(path):
        return False
    draft = f"{path}.{secrets.token_hex(8)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(f"{new_token()}\n")
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(draft)
    return True
