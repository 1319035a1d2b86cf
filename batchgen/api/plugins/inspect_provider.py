"""The model provider `batchgen` for inspect_ai, which finds it through the package's entry point:

inspect eval TASK --model batchgen/Qwen/Qwen3-8B -M max_model_len=8192
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import TYPE_CHECKING, Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    TopLogprob,
    modelapi,
)
from inspect_ai.tool import ToolCall, ToolChoice, ToolInfo

from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from batchgen.api.python.output import Output

OPTIONS = {
    "max_tokens": "max_tokens",
    "num_choices": "n",
    "stop_seqs": "stop",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "logprobs": "logprobs",
    "top_logprobs": "top_logprobs",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
}
"""The options of inspect_ai that are passed on, and their names in `SamplingParams`."""
OF_INSPECT = {
    *("max_retries", "timeout", "attempt_timeout", "stream_idle_timeout", "max_connections"),
    *("adaptive_connections", "system_message", "max_tool_output", "parallel_tool_calls"),
    *("internal_tools", "cache", "cache_prompt", "fail_on_refusal", "response_schema"),
    *("reasoning_history",),
}
"""Options that are accepted but not passed on: inspect_ai honours them itself, except
`response_schema`, which becomes a constraint."""
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
"""A tool call in generated text; the group is its JSON."""


@modelapi(name="batchgen")  # type: ignore[untyped-decorator]
def batchgen() -> type[ModelAPI]:
    """Return the provider's class, as inspect_ai's registry requires."""
    return BatchgenAPI


class BatchgenAPI(ModelAPI):  # type: ignore[misc]
    """Generates with batchgen's engine. Requests of all samples run together, each as soon as it
    arrives.

    Args:
        model_name: the model, as `LLM` takes it.
        template_kwargs: options of the chat template, such as {"enable_thinking": False}.
        model_args: arguments of `LLM`.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008  (the base class has it so)
        template_kwargs: dict[str, Any] | None = None,
        **model_args: Any,
    ) -> None:
        from batchgen.api.plugins.engine_thread import EngineThread
        from batchgen.api.python.llm import LLM

        if base_url is not None:
            raise ConfigError(f"base_url={base_url}: the model runs in this process: leave it out")
        super().__init__(model_name, base_url, api_key, [], config)
        self._template_kwargs = template_kwargs or {}
        llm = LLM(model_name, **model_args)
        self._tokenizer, self._max_model_len = llm.tokenizer, llm.engine.max_model_len
        self._engine = EngineThread(llm)

    def close(self) -> None:
        """Free the device's memory."""
        self._engine.close()

    def max_connections(self) -> int:
        """Return how many requests inspect_ai sends at once. The engine queues those that do not
        fit."""
        return 1024

    def collapse_user_messages(self) -> bool:
        """Return True: consecutive user messages are merged, because chat templates expect
        alternating turns."""
        return True

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        """Generate the next message of a conversation.

        Raises:
            ValueError: an option cannot be honoured, or the messages do not suit the chat template.
        """
        from batchgen.engine.interface.outputs import RequestError

        started = time.monotonic()
        kwargs = dict(self._template_kwargs)
        if tools and tool_choice != "none":
            if tool_choice != "auto":
                raise ConfigError(f"tool_choice={tool_choice!r} cannot be enforced: use auto")
            kwargs["tools"] = [{"type": "function", "function": _function(tool)} for tool in tools]
        messages = [_message(message) for message in input]
        future = self._engine.submit(messages, self._params(config), kwargs)
        try:
            outputs = await asyncio.wrap_future(future)
        except RequestError as error:
            if error.type != "prompt_too_long":
                raise ConfigError(str(error)) from None
            return ModelOutput.from_content(self.model_name, "", "model_length", str(error))
        if (failure := outputs[0].error) is not None:
            raise ConfigError(str(failure))
        return ModelOutput(
            model=self.model_name,
            choices=[self._choice(output, config, "tools" in kwargs) for output in outputs],
            usage=_usage(outputs),
            time=time.monotonic() - started,
        )

    def _params(self, config: GenerateConfig) -> Any:
        """Convert inspect_ai's options. Raises ConfigError for one that cannot be honoured."""
        from batchgen.api.python.params import SamplingParams

        values = config.model_dump(exclude_none=True)
        if unknown := [name for name in values if name not in OPTIONS and name not in OF_INSPECT]:
            raise ConfigError(
                f"{unknown[0]}={values[unknown[0]]!r} cannot be honoured: batchgen takes "
                f"{', '.join(OPTIONS)} and response_schema"
            )
        options: dict[str, Any] = {"max_tokens": None}
        options |= {OPTIONS[name]: value for name, value in values.items() if name in OPTIONS}
        if config.response_schema is not None:
            schema = config.response_schema.json_schema.model_dump(
                exclude_none=True, by_alias=True, mode="json"
            )
            options["constraint"] = {"json_schema": schema}
        return SamplingParams(**options)

    def _choice(self, output: Output, config: GenerateConfig, tools: bool) -> ChatCompletionChoice:
        """Make a choice of the response from one output. Tool calls are parsed only if the request
        has `tools`."""
        text, calls = (
            _tool_calls(output.text, str(output.request_id)) if tools else (output.text, [])
        )
        reason = "max_tokens" if output.finish_reason == "length" else "stop"
        if len(output.prompt_token_ids) + len(output.token_ids) >= self._max_model_len:
            reason = "model_length"
        message = ChatMessageAssistant(
            content=text, tool_calls=calls or None, model=self.model_name, source="generate"
        )
        return ChatCompletionChoice(
            message=message,
            stop_reason="tool_calls" if calls else reason,
            logprobs=self._logprobs(output) if config.logprobs else None,
        )

    def _logprobs(self, output: Output) -> Logprobs:
        """Convert the log-probabilities of an output's tokens, with those of the most likely tokens
        if there are any."""

        def text(token_id: int) -> str:
            return str(self._tokenizer.decode([int(token_id)])) if self._tokenizer else ""

        assert output.logprobs is not None
        content = []
        for i, (token_id, logprob) in enumerate(
            zip(output.token_ids, output.logprobs.tolist(), strict=True)
        ):
            top = None
            if output.top_logprobs is not None and output.top_logprob_ids is not None:
                best = zip(output.top_logprob_ids[i], output.top_logprobs[i].tolist(), strict=True)
                top = [TopLogprob(token=text(top_id), logprob=value) for top_id, value in best]
            content.append(Logprob(token=text(token_id), logprob=logprob, top_logprobs=top))
        return Logprobs(content=content)


def _function(tool: ToolInfo) -> dict[str, Any]:
    """Return a tool's description as chat templates expect it."""
    parameters = tool.parameters.model_dump(exclude_none=True, by_alias=True, mode="json")
    return {"name": tool.name, "description": tool.description, "parameters": parameters}


def _message(message: ChatMessage) -> dict[str, Any]:
    """Return a message as chat templates expect it. Raises ConfigError if the message has parts
    other than text and reasoning."""
    if not isinstance(message.content, str):
        kinds = {part.type for part in message.content} - {"text", "reasoning"}
        if kinds:
            raise ConfigError(f"a message has {', '.join(sorted(kinds))}, and models read text")
    values: dict[str, Any] = {"role": message.role, "content": message.text}
    if isinstance(message, ChatMessageTool):
        values |= {"name": message.function, "tool_call_id": message.tool_call_id}
        if message.error is not None:
            values["content"] = f"Error: {message.error.message}"
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        values["tool_calls"] = [
            {"type": "function", "function": {"name": call.function, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return values


def _tool_calls(text: str, request_id: str) -> tuple[str, list[ToolCall]]:
    """Parse calls `<tool_call>{"name": …, "arguments": …}</tool_call>`. Returns the text without
    the calls, and the calls. A call that cannot be parsed has a `parse_error`."""
    calls = []
    for number, body in enumerate(_CALL.findall(text)):
        name, arguments, mistake = "unknown", {}, None
        try:
            parsed = json.loads(body)
            name, arguments = str(parsed["name"]), dict(parsed.get("arguments") or {})
        except (KeyError, TypeError, ValueError) as error:
            mistake = f"{body!r:.200} is not a tool call: {error!r}"
        calls.append(ToolCall(f"call_{request_id}_{number}", name, arguments, mistake))
    return _CALL.sub("", text).strip() if calls else text, calls


def _usage(outputs: list[Output]) -> ModelUsage:
    num_input = len(outputs[0].prompt_token_ids)
    num_output = sum(len(output.token_ids) for output in outputs)
    return ModelUsage(
        input_tokens=num_input, output_tokens=num_output, total_tokens=num_input + num_output
    )
