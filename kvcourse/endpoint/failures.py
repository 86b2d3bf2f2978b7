"""What can go wrong on the way to a server, each as one sentence that says what to do."""

import json
import socket
import ssl

import httpx

from kvcourse.endpoint.events import EndpointError, error_message, shortened

BASE = "the URL should be the base of the server, such as http://127.0.0.1:8080"
CONNECT_AT_MOST = 10.0  # seconds
READ_AT_MOST = 65536  # bytes of an answer that is an error


def explain(error: Exception, url: str, timeout: float) -> str:
    """A sentence for an error of the connection to `url`."""
    causes = list(_causes(error))

    def caused_by(kind: type) -> Exception | None:
        return next((cause for cause in causes if isinstance(cause, kind)), None)

    where = _origin(url)
    if isinstance(error, httpx.ConnectTimeout):
        hint = "; if it speaks plain HTTP, write http:// in place of https://" * where.startswith("https:")
        return f"{where} did not accept a connection within {min(timeout, CONNECT_AT_MOST):g} s{hint}."
    if isinstance(error, httpx.TimeoutException):
        return f"The server stalled: it sent nothing for {timeout:g} s."
    if caused_by(socket.gaierror):
        return f"There is no host {httpx.URL(url).host}: check the name in the URL."
    if certificate := caused_by(ssl.SSLCertVerificationError):
        reason = certificate.verify_message
        return (
            f"The certificate of {where} is not trusted ({reason}): if the server is yours, name its certificate in "
            "the environment variable SSL_CERT_FILE."
        )
    if caused_by(ssl.SSLError):
        return f"{where} does not answer in TLS: if the server speaks plain HTTP, write http:// in place of https://."
    if caused_by(ConnectionRefusedError):
        return f"Nothing listens at {where} (connection refused): start the server, or check the port."
    if isinstance(error, httpx.ConnectError):
        return f"No connection to {where}: {shortened(str(causes[-1]) or 'the network gave no reason')}"
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
        return (
            f"{where} did not give a whole answer in HTTP: the server may have failed, be no web server, or expect "
            "https://."
        )
    return f"The request to {url} failed: {shortened(str(error) or type(error).__name__)}"


def _causes(error: BaseException):
    """The error, and all that it came from; where several addresses of a host were tried, what came of each."""
    yield error
    for inner in (*getattr(error, "exceptions", ()), error.__cause__ or error.__context__):
        if inner is not None:
            yield from _causes(inner)


def _origin(url: str) -> str:
    whole = httpx.URL(url)
    return f"{whole.scheme}://{whole.netloc.decode()}"


async def require_ok(response: httpx.Response, has_key: bool) -> None:
    """Raise `EndpointError` unless the status of the response is that of success."""
    if response.is_success:
        return
    code, url = response.status_code, response.url
    status = f"{code} {response.reason_phrase}".strip()
    if response.has_redirect_location:
        target = response.headers["location"]
        raise EndpointError(f"{url} redirects to {target} ({status}), which is not followed: give the URL meant.")
    said = await _message(response)
    if code in (401, 403):
        do = "check the key" if has_key else "give the API key, or set KVCOURSE_API_KEY"
        raise EndpointError(f"{url} refuses access ({status}): {do}. The server said: {said}")
    if code == 404:
        raise EndpointError(f"{url}, or the model, is not there ({status}): {BASE}. The server said: {said}")
    raise EndpointError(f"{url} answered {status}: {said}")


async def require_stream(response: httpx.Response) -> None:
    """Raise `EndpointError` unless the response is a stream of events, or does not say what it is."""
    kind = response.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind in ("", "text/event-stream"):
        return
    text = await _beginning(response)
    try:
        content = json.loads(text)
    except ValueError:
        content = {}
    if isinstance(content, dict) and content.get("error"):
        raise EndpointError(f"{response.url} answered with an error: {error_message(content)}")
    raise EndpointError(
        f"{response.url} answered without streaming ({kind} in place of text/event-stream): times of tokens cannot be "
        "measured there."
    )


async def _message(response: httpx.Response) -> str:
    text = await _beginning(response)
    try:
        return error_message(json.loads(text))
    except ValueError:
        return shortened(text) if text.strip() else "nothing."


async def _beginning(response: httpx.Response) -> str:
    received = b""
    async for piece in response.aiter_bytes():
        received += piece
        if len(received) >= READ_AT_MOST:
            break
    return received.decode(errors="replace")
