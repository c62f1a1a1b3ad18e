"""What the Hugging Face hub says when it does not serve, in one line, for models and data sets alike."""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit

from harness.errors import reason

NEEDS_TOKEN = (401, 403)


def refusal(error: Exception) -> str:
    """Why a request to the hub failed: its own answer where it gave one, else how it was not reached, else what the
    client says."""
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import httpx  # whichever client this version uses

    chain = list(_causes(error))
    for each in chain:
        if getattr(each, "response", None) is not None:
            return _answer(each)
    for each in chain:
        if isinstance(each, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set"
        if isinstance(each, httpx.TimeoutException | TimeoutError):
            return f"{constants.ENDPOINT} gave no answer in time ({type(each).__name__})"
        if isinstance(each, httpx.ConnectError | ConnectionError):
            return f"{constants.ENDPOINT} is unreachable ({type(each).__name__})"
    if isinstance(error, URLError):  # such as a name that nobody knows
        return f"{constants.ENDPOINT} is unreachable ({error.reason})"
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return reason(error)


def wait_of(error: BaseException) -> float | None:
    """Seconds after which the hub invites to ask again; None where it says nothing of the kind."""
    from huggingface_hub.utils import parse_ratelimit_headers

    for each in _causes(error):
        response = getattr(each, "response", None)
        if response is not None and response.status_code == HTTPStatus.TOO_MANY_REQUESTS:
            limit = parse_ratelimit_headers(response.headers)
            told = response.headers.get("Retry-After", "")
            return limit.reset_in_seconds if limit else float(told) if told.isdigit() else None
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _answer(error: Any) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    code = error.response.status_code
    said = " ".join((getattr(error, "server_message", None) or HTTPStatus(code).phrase).split())
    answer = f"the hub answered {code} to {urlsplit(str(error.response.url)).path}: {said}"
    if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
        answer = f"no such repository, or a private one ({answer})"
    wait = wait_of(error)
    later = "" if wait is None else f"; it invites to ask again in {wait:g} s"
    return answer + (" (`hf auth login`, or HF_TOKEN=)" if code in NEEDS_TOKEN else later)
