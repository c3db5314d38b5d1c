"""Signatures of peers: Ed25519 with a key for each peer, or a secret that all peers share (HMAC of SHA-256)."""

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DOMAIN = b"deepy peers 1\0"  # a key that signs other things too does not sign a contribution by accident


class Signer:
    """Signs with this peer's key, and checks the signatures of others.

    Args:
        secret: 32 bytes.
        public: public keys of the members, 64 hexadecimal digits. None: all members share `secret`.
    """

    def __init__(self, secret: bytes, public: Mapping[str, str] | None) -> None:
        self._secret, self._public = secret, public

    @classmethod
    def of(cls, own: Any) -> "Signer":
        """From the section `peers`."""
        secret = bytes.fromhex(Path(own.key_file).expanduser().read_text(encoding="ascii").strip())
        return cls(secret, None if own.signature == "shared_key" else own.public_keys)

    def sign(self, name: str, message: bytes) -> str:
        """Signature of a member's message, in hexadecimal digits."""
        if self._public is None:
            return self._code(name, message)
        return ed25519_sign(self._secret, _DOMAIN + message).hex()

    def good(self, name: str, message: bytes, signature: str) -> bool:
        """Whether the member of this name has signed the message."""
        if self._public is None:
            return hmac.compare_digest(self._code(name, message).encode(), signature.encode())
        if name not in self._public:
            return False
        return ed25519_verify(self._public[name], _DOMAIN + message, signature)

    def _code(self, name: str, message: bytes) -> str:
        return hmac.new(self._secret, _DOMAIN + name.encode() + b"\0" + message, hashlib.sha256).hexdigest()


def ed25519_public(secret: bytes) -> str:
    """The public key of a secret one, 64 hexadecimal digits."""
    try:
        from nacl.signing import SigningKey
    except ImportError:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw().hex()
    return bytes(SigningKey(secret).verify_key).hex()


def ed25519_sign(secret: bytes, message: bytes) -> bytes:
    try:
        from nacl.signing import SigningKey
    except ImportError:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return bytes(Ed25519PrivateKey.from_private_bytes(secret).sign(message))
    return bytes(SigningKey(secret).sign(message).signature)


def ed25519_verify(public: str, message: bytes, signature: str) -> bool:
    try:
        from nacl.signing import VerifyKey
    except ImportError:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        check: Any = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify
    else:
        verifier = VerifyKey(bytes.fromhex(public))
        check = lambda signed, text: verifier.verify(text, signed)  # noqa: E731
    try:
        check(bytes.fromhex(signature), message)
    except Exception:  # each library has its own error for a bad signature, and for one of another length
        return False
    return True
