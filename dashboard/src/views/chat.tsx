// A conversation with a model that this server serves: streamed, stopped at will, kept in this view alone.
import { useEffect, useRef, useState } from "preact/hooks";
import { useKeys } from "../keys";
import { Empty, Failed, Head, Waiting } from "../parts";
import { messageOf, Refused, useLoaded } from "../request";
import { ask, place } from "../route";
import { type Message, OneMessage } from "./conversation";

const MAX_TOKENS = 1024;

export function Chat() {
  const models = useLoaded("models", loadModels);
  if (models.error?.status === 404) return <NoModel />;
  return (
    <section class="view chat">
      {!models.data && <Head title="Chat" />}
      <Waiting loaded={models}>
        {(names) => (names.length ? <Talk names={names} /> : <NoModel />)}
      </Waiting>
    </section>
  );
}

function NoModel() {
  return (
    <section class="view">
      <Head title="Chat" />
      <Empty>
        <p>
          This server serves no model. Talk to a checkpoint in the terminal with <code>agl chat CHECKPOINT</code>, or on
          the page of <code>agl serve CHECKPOINT</code>. The page of a running <code>agl train</code> talks to the model in
          training.
        </p>
      </Empty>
    </section>
  );
}

function Talk({ names }: { names: string[] }) {
  const asked = place.value.query.get("model");
  const model = names.find((name) => name === asked) ?? names[0] ?? "";
  const [turns, setTurns] = useState<Message[]>([]);
  const [answer, setAnswer] = useState<Message>();
  const [text, setText] = useState("");
  const [problem, setProblem] = useState("");
  const under = useRef<AbortController | undefined>(undefined);
  const stop = () => under.current?.abort();
  useEffect(() => stop, []);
  useKeys(answer ? { Escape: stop } : {});
  const send = async (event: Event) => {
    event.preventDefault();
    const said: Message[] = [...turns, { role: "user", content: text.trim() }];
    const mine = (under.current = new AbortController());
    let so_far: Message = { role: "assistant", content: "" };
    setTurns(said);
    setText("");
    setProblem("");
    setAnswer(so_far);
    try {
      for await (const delta of answered(model, said, mine.signal)) setAnswer((so_far = added(so_far, delta)));
    } catch (error) {
      if (!mine.signal.aborted && !(error instanceof Refused)) throw error;
      if (!mine.signal.aborted) setProblem((error as Refused).message);
    } finally {
      setAnswer(undefined);
      if (so_far.content || so_far.tool_calls) setTurns([...said, so_far]);
    }
  };
  return (
    <>
      <Head title="Chat">
        <select aria-label="Model" value={model} onChange={(event) => ask({ model: event.currentTarget.value })}>
          {names.map((name) => (
            <option key={name}>{name}</option>
          ))}
        </select>
        <button type="button" onClick={() => setTurns([])} disabled={answer !== undefined || turns.length === 0}>
          New conversation
        </button>
      </Head>
      <div class="conversations" role="log" aria-label="Conversation">
        {turns.map((turn, index) => (
          <OneMessage message={turn} sampled={turn.role === "assistant"} key={index} />
        ))}
        {answer && <OneMessage message={answer} sampled />}
        {problem && <Failed message={problem} />}
      </div>
      <form class="say" onSubmit={(event) => void send(event)}>
        <textarea
          rows={3}
          aria-label="Message"
          placeholder="Message; Ctrl+Enter sends"
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.currentTarget.form?.requestSubmit();
          }}
        />
        {answer ? (
          <button type="button" onClick={stop}>
            Stop
          </button>
        ) : (
          <button type="submit" class="main" disabled={text.trim() === ""}>
            Send
          </button>
        )}
      </form>
    </>
  );
}

async function loadModels(signal: AbortSignal): Promise<string[]> {
  const answer = await asked("v1/models", { signal });
  return ((await answer.json()) as { data: { id: string }[] }).data.map((one) => one.id);
}

async function asked(path: string, how: RequestInit): Promise<Response> {
  const answer = await fetch(path, how).catch((error: unknown) => {
    if (how.signal?.aborted) throw error;
    throw new Refused(0, "the server does not answer; is it running?");
  });
  if (!answer.ok) throw new Refused(answer.status, messageOf(await answer.text()) ?? `the server answered ${answer.status}`);
  return answer;
}

interface Delta {
  content?: string | null;
  tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
}

/** The pieces of the answer, as they come: events of a stream, each a line of `data:`. */
async function* answered(model: string, messages: Message[], signal: AbortSignal): AsyncGenerator<Delta> {
  const body = JSON.stringify({ model, messages, stream: true, max_tokens: MAX_TOKENS });
  const answer = await asked("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body,
    signal,
  });
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", read = await reader.read(); !read.done; read = await reader.read()) {
    const lines = (rest + read.value).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6)) as { choices?: { delta?: Delta }[]; error?: { message: string } };
      if (event.error) throw new Refused(500, event.error.message);
      const delta = event.choices?.[0]?.delta;
      if (delta) yield delta;
    }
  }
}

/** The message with a piece more. */
function added(message: Message, delta: Delta): Message {
  const calls = [...(message.tool_calls ?? [])];
  for (const { index, id, function: piece } of delta.tool_calls ?? []) {
    const before = calls[index] ?? { id: "", function: { name: "", arguments: "" } };
    calls[index] = {
      id: before.id + (id ?? ""),
      function: {
        name: before.function.name + (piece?.name ?? ""),
        arguments: before.function.arguments + (piece?.arguments ?? ""),
      },
    };
  }
  const content = `${message.content as string}${delta.content ?? ""}`;
  return calls.length ? { ...message, content, tool_calls: calls } : { ...message, content };
}
