"""Errors by blame: who has to act, and what HTTP says about it.

Four kinds. A ``ClientError`` is the request's fault (4xx, the client changes it). ``Unavailable`` is the moment's fault
(503 or 429, the client comes back). ``EngineError`` is ours (500, one request fails, the server lives). ``StartError`` is
the operator's: the server has not started; the message names the file or key and the fix. Any other exception is a bug.

Messages are written for the person who can act on them and never quote prompts, keys or paths of a request.
"""

from __future__ import annotations


class StrataError(Exception):
    """Base of every error that is part of the contract.

    Attributes: ``status`` HTTP status; ``type`` and ``code`` the fields of the OpenAI error object;
    ``param`` the request field to blame, if one is; ``retry_after`` seconds for the Retry-After header, if any;
    ``extra`` further members of the error object.
    """

    status = 500
    type = "server_error"
    code: str | None = None
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.extra: dict[str, int] = {}


class ClientError(StrataError):
    """The request cannot be served as sent; sending it again unchanged will not help."""

    status = 400
    type = "invalid_request_error"


class ContextExceeded(ClientError):
    """The prompt, or the prompt and ``max_tokens``, do not fit the context. Carries both numbers.

    ``at_least``: the prompt is so long that it was not even tokenised; it has that many tokens or more.
    """

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_tokens: int, context: int, at_least: bool = False) -> None:
        wanted = f"{'at least ' * at_least}{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} to generate)"
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, you requested {wanted}. "
            "Please shorten the prompt or lower max_tokens.",
            param="prompt",
        )
        self.extra = {"n_prompt_tokens": prompt_tokens, "n_ctx": context}


class Unauthorized(ClientError):
    """No API key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(ClientError):
    """Understood, and not allowed here (a foreign Host or Origin)."""

    status = 403
    type = "permission_error"


class NotFound(ClientError):
    """No such route, model or slot."""

    status = 404
    type = "not_found_error"


class MethodNotAllowed(ClientError):
    """The route exists for another method."""

    status = 405


class RequestTimeout(ClientError):
    """The client took too long to send its request."""

    status = 408
    type = "timeout_error"


class TooLarge(ClientError):
    """Body or head over the stated limit."""

    status = 413


class UnsupportedMedia(ClientError):
    """A body in an encoding that is not read here (gzip, zstd)."""

    status = 415


class HeadersTooLarge(ClientError):
    """Too many header bytes or fields."""

    status = 431


class Unavailable(StrataError):
    """Nothing wrong with the request: not now, or not here."""

    status = 503
    type = "unavailable_error"
    retry_after = 1


class QueueFull(Unavailable):
    """The queue is at its cap, or a request waited in it past its deadline."""

    type = "overloaded_error"
    code = "queue_full"


class Loading(Unavailable):
    """The model is still loading."""

    code = "loading"


class Draining(Unavailable):
    """The server is shutting down and takes nothing new."""

    code = "draining"
    retry_after = 5


class EngineError(StrataError):
    """The engine failed at this request's window; other requests go on."""

    type = "engine_error"


class NotFinite(EngineError):
    """The model gave this request logits that are not finite numbers."""

    code = "not_finite"


class EngineDead(Unavailable):
    """The engine has stopped for good; the server must be restarted."""

    code = "engine_dead"


class StartError(StrataError):
    """The server cannot start. The message is one line that says what to do."""


class SettingError(StartError):
    """A setting is unknown, of the wrong type, or out of range. Names key, value, origin and range."""


class ModelError(StartError):
    """The model file is broken, incomplete or of a kind that is not served. Names the file and what was found."""
