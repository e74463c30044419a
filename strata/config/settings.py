"""Every setting of the server: THE table. Adding one is adding one row here.

Rules: a row's words are for the person who sets it; a name is the flag without dashes; sizes and times carry their unit in
the name; a default works for most people. Nothing is listed that this build does not serve. ``Settings`` never changes after
birth: what follows from it is computed where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from strata.config.kinds import Choice, Devices, FilePath, Integer, Integers, Maybe, Names, Number, Switch, Text
from strata.config.table import Row, row, rows_of
from strata.errors import SettingError

START, MODEL, ENGINE, SLOTS, QUEUE = "Start", "Model", "Engine", "Slots", "Queue"
NETWORK, ACCESS, SAMPLING, LOG = "Network", "Access", "Sampling defaults", "Log"

_DAY = 86400.0


@dataclass(frozen=True)
class Settings:
    """One value per setting, checked. Raises ``SettingError`` for a value out of its row's range."""

    config: Path | None = row(
        Maybe(FilePath(), "none"), None, START, "Config file: one JSON object with the keys of this table.", in_file=False
    )

    model: Path | None = row(
        Maybe(FilePath(), "none"), None, MODEL, "GGUF file to serve; of a split model, its first file."
    )
    mtp: Path | None = row(
        Maybe(FilePath(), "none"), None, MODEL,
        "GGUF file with a head that drafts tokens for the model (MTP). None: the head within the model's file, if it has one.",
    )
    model_name: str | None = row(
        Maybe(Text("NAME", "a name"), "none"), None, MODEL, "Name of the model in the API. None: the file's name without its ending."
    )
    aliases: tuple[str, ...] = row(Names("names"), (), MODEL, "Further names that requests may use for the model.")
    strict_model: bool = row(
        Switch(), False, MODEL, "Refuse a request that names another model (404); off: any name means the model served."
    )

    device: str = row(
        Choice("cpu", "cuda", "emulated"), "cpu", ENGINE,
        "What computes: the processors, NVIDIA GPUs, or the GPU's kernels run by the processors (slow, for tests).",
    )
    devices: tuple[str, ...] = row(
        Devices("numbers or UUIDs of GPUs, or cpu,"), (), ENGINE,
        "The device of each pipeline stage, in this order; one may come again. A UUID (GPU-...) may be cut short. CPU and GPUs do not mix. "
        "None: every visible GPU, one elsewhere, or as many as layer_split makes stages.", aliases=("gpu",),
    )
    layer_split: tuple[int, ...] | None = row(
        Maybe(Integers(0, 100_000, "whole numbers"), "auto"), None, ENGINE,
        "First layer of each stage but the first. auto: balanced by bytes and by how fast each GPU was measured to read them.",
        unit="layers",
    )
    peer_copy: bool = row(
        Switch(), False, ENGINE,
        "Rows go from GPU to GPU directly where a test at the start gets every byte across. Off: by way of host memory.",
    )
    trim_stage_weights: bool = row(
        Switch(), True, ENGINE, "Each stage loads only its own layers' weights. Always so; off is refused."
    )
    threads: int | None = row(
        Maybe(Integer(1, 1024), "auto"), None, ENGINE, "Threads that compute. auto: the processors this process may use."
    )
    kernel_cache: Path | None = row(
        Maybe(FilePath(), "auto"), None, ENGINE,
        "Folder of compiled kernels. auto: strata/kernels in the user's cache folder (XDG_CACHE_HOME, LOCALAPPDATA).",
        system=(("XDG_CACHE_HOME", "strata/kernels"), ("LOCALAPPDATA", "strata/kernels")),
    )
    cuda_toolkit: Path | None = row(
        Maybe(FilePath(), "auto"), None, ENGINE,
        "Folder of a CUDA toolkit whose NVRTC compiles kernels where no package brings one. auto: CUDA_PATH, CUDA_HOME, /usr/local/cuda.",
        system=(("CUDA_PATH", ""), ("CUDA_HOME", "")),
    )
    compiler: str | None = row(
        Maybe(Text("COMMAND", "a command"), "auto"), None, ENGINE,
        "C++ compiler of the emulated device. auto: CXX, else g++, else clang++.",
        system=(("CXX", ""),),
    )
    context: int | None = row(
        Maybe(Integer(16, 1 << 24), "auto"), None, ENGINE,
        "Longest prompt and answer of one request. auto: what the model was trained for.", unit="tokens",
    )
    kv: str | None = row(
        Maybe(Choice("f32", "f16", "int8"), "auto"), None, ENGINE,
        "How keys and values are kept: exact (f32, CPU), in half the memory (f16, GPU) or a quarter. auto: f32 on the CPU, int8 elsewhere.",
    )
    kv_memory_mib: int | None = row(
        Maybe(Integer(1, 1 << 24), "auto"), None, ENGINE,
        "Memory for keys and values. auto: one full context for every slot, as far as memory allows.", unit="MiB",
    )
    expert_cache_mib: int | None = row(
        Maybe(Integer(1, 1 << 24), "auto"), None, ENGINE,
        "Memory of the CPU for decoded experts; those used last are kept, the others stay as the file has them. auto: all experts, as far "
        "as three quarters of the free memory hold them.", unit="MiB",
    )
    chunk: int = row(
        Integer(1, 1 << 20), 512, ENGINE, "Prompt tokens read between two looks at the other slots; rounded to the engine's grid.",
        unit="tokens",
    )
    deterministic: bool = row(
        Switch(), False, ENGINE,
        "Read prompts row by row, by the arithmetic of decoding: the same tokens whatever part of a prompt was held; slower.",
    )

    spec: int = row(
        Integer(0, 16), 0, ENGINE,
        "Tokens of a slot that one pass may check: its next one and drafts behind it. Drafts change speed, never tokens, and are left off "
        "while they do not pay. 1: no drafts. 0: 16 on the processors; 4 on devices if the model has a head that drafts, else 1.",
        unit="tokens",
    )
    draft_vocab: int | None = row(
        Maybe(Integer(0, 1 << 24), "auto"), None, ENGINE,
        "Tokens that a head may draft: the most frequent ones of its file's list, of which on the processors half make room for those that "
        "its texts say; fewer are quicker. 0: all. auto: 2048 on the processors, 8192 on devices.", unit="tokens",
    )

    batch: int = row(
        Integer(1, 256), 8, SLOTS, "Slots: requests answered at the same time, and conversations that keep a seat.",
        unit="slots", aliases=("parallel", "slots"),
    )
    batch_groups: int | None = row(
        Maybe(Integer(1, 256), "auto"), None, SLOTS,
        "Groups of slots that take turns in the pipeline; must divide the slots. auto: one for each stage, or one in all where measured "
        "stage times say that this is faster.", unit="groups",
    )
    rows: str = row(
        Choice("compact", "prefix"), "compact", SLOTS, "What a decode window runs: active slots only, or every slot up to the last of them."
    )
    batch_decode_share: float = row(
        Number(0, 0.95), 0.5, SLOTS, "Share of a prompt chunk's time that the other slots get to decode before the next chunk."
    )
    slot_low_first: bool = row(Switch(), True, SLOTS, "Prefer the lowest free slot of a group, which keeps windows short.")
    slot_expire_s: float = row(
        Number(0, 365 * _DAY), 0.0, SLOTS, "A history idle for so long is replaced before younger ones. 0: never by age.", unit="seconds"
    )
    shelf: bool = row(
        Switch(), True, SLOTS, "Keep a conversation that lost its seat in the device's free memory, until that memory is needed."
    )
    conversation_cache_mib: int | None = row(
        Maybe(Integer(0, 1 << 24), "auto"), None, SLOTS,
        "Host memory for conversations that no longer fit the device. auto: a quarter of what is free once the model is loaded. 0: none.",
        unit="MiB",
    )

    queue_size: int = row(
        Integer(0, 1_000_000), 256, QUEUE, "Requests that may wait for a slot; the next one is refused (503).", unit="requests"
    )
    queue_timeout_s: float = row(
        Number(0, 7 * _DAY), 600.0, QUEUE, "Longest wait for a slot, then 503. 0: no limit.", unit="seconds"
    )

    host: str = row(
        Text("HOST", "a host name or address"), "127.0.0.1", NETWORK, "Address to listen on; 0.0.0.0 or :: is every one of this machine."
    )
    port: int = row(Integer(0, 65535), 8080, NETWORK, "Port to listen on. 0: any free one, named in the log.")
    max_connections: int = row(
        Integer(1, 100_000), 512, NETWORK, "Open connections; the next one is told 503 and closed.", unit="connections"
    )
    max_connections_per_address: int | None = row(
        Maybe(Integer(1, 100_000), "none"), None, NETWORK, "Open connections of one client address. None: no cap, as behind a proxy.",
        unit="connections",
    )
    max_body_mib: int = row(Integer(1, 1024), 32, NETWORK, "Largest request body (413).", unit="MiB")
    header_timeout_s: float = row(Number(0.1, _DAY), 10.0, NETWORK, "Time a client has for a request's head (408).", unit="seconds")
    body_timeout_s: float = row(
        Number(0.1, _DAY), 30.0, NETWORK, "Longest pause within a request's body; all of it has a second more for each 8 KiB (408).",
        unit="seconds",
    )
    write_timeout_s: float = row(
        Number(0.1, _DAY), 60.0, NETWORK, "Time a client may leave its answer unread; then its request is cancelled.", unit="seconds"
    )
    keep_alive_timeout_s: float = row(
        Number(0.1, _DAY), 75.0, NETWORK, "Time an idle connection stays open; longer than a proxy's own.", unit="seconds"
    )
    sse_keep_alive_s: float = row(
        Number(0, _DAY), 15.0, NETWORK, "A stream silent for so long gets a comment, so that proxies keep it. 0: never.", unit="seconds"
    )
    drain_timeout_s: float = row(
        Number(0, _DAY), 30.0, NETWORK, "Time that running requests have to end when the server is told to stop.", unit="seconds"
    )

    api_key: str | None = row(
        Maybe(Text("KEY", "a key"), "none"), None, ACCESS, "Key that clients must send (Authorization: Bearer KEY).", secret=True
    )
    api_key_file: Path | None = row(
        Maybe(FilePath(), "none"), None, ACCESS, "File with one key a line; empty lines and lines that begin with # do not count."
    )
    allow_remote_without_key: bool = row(
        Switch(), False, ACCESS, "Listen beyond this machine although no key is set: whoever reaches the port may use it."
    )
    allowed_hosts: tuple[str, ...] = row(
        Names("host names"), (), ACCESS, "Host headers to answer besides localhost and the address listened on; * answers any."
    )
    cors_origins: tuple[str, ...] = row(
        Names("origins"), (), ACCESS, "Web pages (https://host) whose scripts may call the API; * allows any."
    )

    temperature: float = row(
        Number(0, 100), 1.0, SAMPLING, "0: always the likeliest token.", section="sampling"
    )
    top_k: int = row(Integer(0, 1 << 24), 0, SAMPLING, "Only the K likeliest tokens. 0: all.", section="sampling")
    top_p: float = row(
        Number(0, 1, above=True), 1.0, SAMPLING, "Only the likeliest tokens that together have this probability.", section="sampling"
    )
    min_p: float = row(
        Number(0, 1), 0.0, SAMPLING, "Only tokens at least this likely, relative to the likeliest.", section="sampling"
    )
    presence_penalty: float = row(Number(-2, 2), 0.0, SAMPLING, "Against tokens already generated, once each.", section="sampling")
    frequency_penalty: float = row(Number(-2, 2), 0.0, SAMPLING, "Against tokens already generated, by their count.", section="sampling")
    repetition_penalty: float = row(
        Number(0, 100, above=True), 1.0, SAMPLING, "Divides the logits of tokens in prompt and answer. 1: off.", section="sampling"
    )

    log_level: str = row(Choice("debug", "info", "warning", "error"), "info", LOG, "Least serious lines to log.")
    log_format: str = row(Choice("text", "json"), "text", LOG, "One line of text, or one JSON object a line.")
    slot_trace: Path | None = row(
        Maybe(FilePath(), "none"), None, LOG,
        "File to which a line is added for each request that had a slot: ids, times and token counts, no text (for tools/replay.py).",
    )

    def __post_init__(self) -> None:
        for each in TABLE:
            value = getattr(self, each.name)
            try:
                object.__setattr__(self, each.name, each.kind.accept(value))
            except ValueError:
                shown = "***" if each.secret else repr(value)
                raise SettingError(f"Settings({each.name}={shown}): must be {each.range}") from None


TABLE: tuple[Row, ...] = rows_of(Settings)
