"""Sends requests to a bucket of a store that speaks S3. `connect` opens the store of a URL."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.storage.leases.object_store import ObjectStore
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import S3Store

TIMEOUT = 60.0
"""Seconds without progress after which a request counts as unanswered."""
_LONGEST = 3600.0  # seconds of any request
_SLOWEST = 2**20
"""Bytes per second. An upload in one request is expected to be at least this fast."""
_LARGE = 8 * 2**20  # bytes from which on the timeout of an upload grows with its size
_LARGEST_PUT = 5 * 2**30  # bytes
_KEEP_KEYS = timedelta(minutes=10)  # after which botocore is asked again
_ANSWER = re.compile(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)


class S3Objects:
    """The objects below s3://BUCKET/NAME, see `batchgen.storage.leases.object_store.Objects`."""

    def __init__(self, url: str) -> None:
        """Find out where the bucket is and which keys open it. No request is sent yet.

        Raises:
            ConfigError: a package or the keys are missing, or the URL names no bucket.
        """
        self._bucket, _, self._prefix = url.removeprefix("s3://").partition("/")
        try:
            self._account = _account()
            self._store = self._open(timeout=_LONGEST, read_timeout=TIMEOUT)
        except ImportError as error:
            raise ConfigError(
                f"{url}: S3 needs the package {error.name}: pip install 'batchgen[s3]'"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{url}: {error}") from None

    def create(self, name: str, content: bytes) -> None:
        """Make an object. The condition holds only for a single PUT, not for an upload in parts.

        Raises:
            FileExistsError: there is one already.
            ValueError: the content is too large for one PUT.
        """
        if len(content) > _LARGEST_PUT:
            raise ValueError(
                f"it has {len(content) / 2**30:.1f} GiB, and a conditional write to S3 takes at "
                "most 5 GiB: use a smaller output.rows_per_shard in a new folder"
            )
        store = self._store
        if len(content) > _LARGE:  # a slow upload needs more time
            store = self._open(timeout=TIMEOUT + len(content) / _SLOWEST)
        with _builtin_errors(name):
            store.put(name, content, mode="create")

    def overwrite(self, name: str, content: bytes) -> None:
        with _builtin_errors(name):
            self._store.put(name, content)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        with _builtin_errors(name):
            if end is None:
                return bytes(self._store.get(name).bytes())[start:]
            return bytes(self._store.get_range(name, start=start, end=end))

    def about(self, name: str) -> tuple[int, float]:
        with _builtin_errors(name):
            about = self._store.head(name)
        return about["size"], about["last_modified"].timestamp()

    def names(self, folder: str) -> list[str]:
        with _builtin_errors(folder):
            answer = self._store.list_with_delimiter(folder or None)
        paths = [*answer["common_prefixes"], *(about["path"] for about in answer["objects"])]
        return [path.rpartition("/")[2] for path in paths]

    def sizes(self, folder: str) -> dict[str, int]:
        with _builtin_errors(folder):
            answer = self._store.list(folder or None).collect()
        return {about["path"]: about["size"] for about in answer}

    def delete(self, name: str) -> None:
        with _builtin_errors(name):
            self._store.delete(name)

    def _open(self, **seconds: float) -> S3Store:
        from obstore.store import S3Store

        client: Any = {name: timedelta(seconds=value) for name, value in seconds.items()}
        return S3Store(
            self._bucket,
            prefix=self._prefix or None,
            config=self._account["config"],
            client_options=self._account["client"] | client,
            retry_config={"max_retries": 0},  # ObjectStore repeats requests
            credential_provider=self._account["keys"],
        )


def connect(url: str) -> ObjectStore:
    """Open the store of a URL, with the keys and the endpoint that the AWS tools would use."""
    return ObjectStore(S3Objects(url), url)


def _account() -> dict[str, Any]:
    """The options that obstore needs in addition to environment variables, which it reads itself.

    Keys, region, endpoint and certificates in files of the AWS tools, single sign-on and roles of
    machines are left to botocore, which is imported only for them.

    Raises:
        ValueError: there are no keys, or files of the AWS tools cannot be read.
    """
    variable = os.environ.get
    for name in os.environ:
        if name.startswith("FSSPEC_S3"):
            raise ValueError(
                f"{name} is not supported: unset it, and set AWS_ENDPOINT_URL, AWS_PROFILE, "
                "AWS_REGION or AWS_SKIP_SIGNATURE instead"
            )
    # Not every store that speaks S3 has the request that deletes several objects.
    config: dict[str, Any] = {"disable_bulk_delete": True}
    endpoint = variable("AWS_ENDPOINT_URL_S3") or variable("AWS_ENDPOINT_URL")
    certificates = variable("AWS_CA_BUNDLE")
    keys = None
    file = Path(variable("AWS_CONFIG_FILE") or "~/.aws/config").expanduser()
    if not (variable("AWS_ACCESS_KEY_ID") and variable("AWS_SECRET_ACCESS_KEY")) or file.is_file():
        from botocore.configprovider import ConfiguredEndpointProvider
        from botocore.exceptions import BotoCoreError
        from botocore.session import get_session

        session = get_session()
        try:
            scoped = session.get_scoped_config()
            endpoint = ConfiguredEndpointProvider(session.full_config, scoped, "s3").provide()
            certificates = session.get_config_variable("ca_bundle")
            if (region := session.get_config_variable("region")) and not variable("AWS_REGION"):
                config["region"] = region
            if variable("AWS_SKIP_SIGNATURE", "").lower() not in ("1", "true"):
                keys = _keys(session)
        except BotoCoreError as error:
            raise ValueError(str(error)) from None
    if endpoint:
        config["endpoint"] = endpoint
    client: dict[str, Any] = {"allow_http": (endpoint or "").startswith("http://")}
    if certificates:
        client["root_certificate"] = Path(certificates).read_bytes()
    return {"config": config, "client": client, "keys": keys}


def _keys(session: Any) -> Callable[[], dict[str, Any]]:
    """A function that returns the keys of a botocore session. obstore calls it again when they
    expire."""
    credentials = session.get_credentials()
    if credentials is None:
        raise ValueError(
            "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or "
            "another way that the AWS tools know; or AWS_SKIP_SIGNATURE=true, for none"
        )

    def keys() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _KEEP_KEYS,
        }

    return keys


@contextmanager
def _builtin_errors(name: str) -> Iterator[None]:
    """A context that turns obstore's errors into Python's. A plain OSError means that there was no
    answer."""
    from obstore import exceptions

    try:
        yield
    except exceptions.AlreadyExistsError as error:
        raise FileExistsError(name) from error
    except exceptions.BaseError as error:
        answer = _ANSWER.search(str(error))
        why = f"{answer[1]}: {answer[2]}" if answer else str(error).partition("\n")[0]
        if isinstance(error, exceptions.PermissionDeniedError):
            raise PermissionError(f"no permission ({why})") from error
        if answer and answer[1] == "NoSuchBucket":
            raise FileNotFoundError(why) from error
        if "Received redirect" in why:
            raise ValueError("the bucket is in another region: set AWS_REGION") from error
        raise OSError(why) from error
