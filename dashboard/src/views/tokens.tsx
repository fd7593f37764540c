// One call token by token: what was read, what was sampled, and what learning made of each.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { ExplainedBreak, TokenView } from "../api";
import { count, number, oneLine, signed, visible } from "../format";
import { useKeys } from "../keys";
import { Choice, Empty, Facts, Waiting } from "../parts";
import { query, useGet } from "../request";
import { ask, place } from "../route";

const SHADES = ["logprob", "advantage", "version", "none"] as const;
type Shade = (typeof SHADES)[number];

const LEAST = 1e-9; // an advantage
const LONGEST_PROMPT = 2000; // tokens of a prompt that are shown, its last ones, unless all are asked for

export function Tokens({ rolloutId }: { rolloutId: string }) {
  const call = place.value.query.get("call") ?? undefined;
  const path = `dashboard/rollouts/${encodeURIComponent(rolloutId)}/tokens${query({ call })}`;
  const loaded = useGet<TokenView>(path, (happened) => happened.rollout_id === rolloutId);
  return <Waiting loaded={loaded}>{(view) => <Call view={view} />}</Waiting>;
}

function Call({ view }: { view: TokenView }) {
  const asked = SHADES.find((shade) => shade === place.value.query.get("color"));
  const shade = asked ?? "logprob";
  const now = view.calls.findIndex((call) => call.span_id === view.span_id);
  const move = (by: number) => {
    const next = view.calls[Math.max(0, Math.min(view.calls.length - 1, now + by))];
    if (next) ask({ call: next.span_id });
  };
  useKeys({ j: () => move(1), k: () => move(-1) });
  return (
    <div class="tokens">
      <div class="toolbar">
        <label>
          Call{" "}
          <select value={view.span_id} onChange={(event) => ask({ call: event.currentTarget.value })}>
            {view.calls.map((call) => (
              <option value={call.span_id} key={call.span_id}>
                {`${call.call_index}${call.agent ? ` · ${oneLine(call.agent, 30)}` : ""} · ${count(call.prompt_tokens)} → ${count(call.sampled_tokens)}`}
              </option>
            ))}
          </select>
        </label>
        <Choice label="Colour by" options={SHADES} value={shade} choose={(color) => ask({ color })} />
        {!view.tokenizer && <span class="note">No tokenizer is known for this model: ids are shown.</span>}
      </div>
      {view.break && <Broken found={view.break} />}
      <Prompt view={view} />
      <Sampled view={view} shade={shade} />
    </div>
  );
}

function Prompt({ view }: { view: TokenView }) {
  const [all, setAll] = useState(false);
  const { ids, texts, shared } = view.prompt;
  const from = all ? 0 : Math.max(0, ids.length - LONGEST_PROMPT);
  return (
    <section aria-label="Prompt">
      <h2>
        Prompt <span class="muted">{count(ids.length)} tokens</span>
        {shared > 0 && <span class="muted">, the first {count(shared)} as in an earlier call</span>}
      </h2>
      {from > 0 && (
        <button type="button" class="quiet" onClick={() => setAll(true)}>
          show the first {count(from)} too
        </button>
      )}
      <p class="ids prompt" tabIndex={0}>
        {ids.slice(from).map((id, index) => (
          <span
            class={`token ${from + index < shared ? "shared" : ""}`}
            title={`${from + index}: id ${id}`}
            key={from + index}
          >
            <Piece id={id} text={texts?.[from + index]} />
          </span>
        ))}
      </p>
    </section>
  );
}

interface Sample {
  id: number;
  text: string | undefined;
  logprob: number | undefined;
  version: number | undefined;
  advantage: number | undefined;
}

function Sampled({ view, shade }: { view: TokenView; shade: Shade }) {
  const { ids, texts, logprobs, versions, advantages } = view.sampled;
  const [pointed, setPointed] = useState(0);
  const samples = ids.map((id, index): Sample => {
    return {
      id,
      text: texts?.[index],
      logprob: logprobs[index],
      version: versions[index],
      advantage: advantages?.[index],
    };
  });
  const most = Math.max(LEAST, ...samples.map((one) => Math.abs(one.advantage ?? 0)));
  const newest = Math.max(...versions);
  const sum = logprobs.reduce((total, one) => total + one, 0);
  const one = samples[pointed];
  const line = useRef<HTMLParagraphElement>(null);
  const move = (by: number) => setPointed(Math.max(0, Math.min(ids.length - 1, pointed + by)));
  useKeys({ ArrowRight: () => move(1), ArrowLeft: () => move(-1) });
  const over = (event: MouseEvent) => {
    const at = (event.target as HTMLElement).closest<HTMLElement>("[data-index]");
    if (at) setPointed(Number(at.dataset["index"]));
  };
  // Thousands of tokens are made once, not whenever the pointer moves.
  const pieces = useMemo(
    () =>
      samples.map((sample, index) => (
        <span
          class="token"
          style={{ backgroundColor: background(shade, sample, most, newest) }}
          title={spoken(sample, index)}
          data-index={index}
          key={index}
        >
          <Piece id={sample.id} text={sample.text} />
        </span>
      )),
    [view, shade],
  );
  useEffect(() => {
    const at = line.current?.children[pointed];
    at?.classList.add("pointed");
    return () => at?.classList.remove("pointed");
  }, [pointed, pieces]);
  if (ids.length === 0) return <Empty>The model answered with no token at all.</Empty>;
  return (
    <section aria-label="Sampled">
      <h2>
        Sampled{" "}
        <span class="muted">
          {count(ids.length)} tokens, mean logprob {number(sum / ids.length)}
        </span>
      </h2>
      <Legend shade={shade} most={most} view={view} />
      <p class="ids sampled" tabIndex={0} ref={line} onMouseOver={over} onClick={over}>
        {pieces}
      </p>
      {one && (
        <Facts
          facts={[
            ["Token", <code key="token">{one.text === undefined ? one.id : visible(one.text)}</code>],
            ["Place", `${pointed + 1} of ${ids.length}`],
            ["Id", String(one.id)],
            ["Logprob", number(one.logprob)],
            ["Probability", one.logprob === undefined ? null : number(Math.exp(one.logprob))],
            ["Advantage", one.advantage === undefined ? null : signed(one.advantage)],
            ["Policy version", one.version === undefined || one.version < 0 ? "unknown" : String(one.version)],
          ]}
        />
      )}
    </section>
  );
}

function spoken(sample: Sample, index: number): string {
  const advantage = sample.advantage === undefined ? "" : `, advantage ${signed(sample.advantage)}`;
  return `${index}: id ${sample.id}, logprob ${number(sample.logprob)}${advantage}, version ${sample.version ?? "?"}`;
}

/** A token's colour: unlikely ones and blamed ones warm, praised ones cool. */
function background(shade: Shade, sample: Sample, most: number, newest: number): string {
  const mixed = (color: string, share: number) =>
    `color-mix(in srgb, var(${color}) ${Math.round(Math.min(1, share) * 45)}%, transparent)`;
  switch (shade) {
    case "logprob":
      return mixed("--warm", Math.min(6, -(sample.logprob ?? 0)) / 6);
    case "advantage":
      return mixed((sample.advantage ?? 0) < 0 ? "--bad" : "--good", Math.abs(sample.advantage ?? 0) / most);
    case "version":
      return mixed("--accent", Math.min(4, newest - (sample.version ?? newest)) / 4);
    case "none":
      return "transparent";
  }
}

function Legend({ shade, most, view: { sampled } }: { shade: Shade; most: number; view: TokenView }) {
  const said = {
    logprob: "The stronger the colour, the less likely the token was where it was sampled (full at a logprob of −6).",
    advantage: sampled.advantages
      ? `Green was praised, red was blamed; ${most > LEAST ? `full at ${number(most)}` : "here all are 0"}. Advantages are computed as the run trains with.`
      : "There are no advantages: the rollout is held out, its group is not complete, or nothing compares it.",
    version: "The stronger the colour, the older the weights that sampled the token.",
    none: "",
  }[shade];
  return said ? <p class="note">{said}</p> : null;
}

function Piece({ id, text }: { id: number; text: string | undefined }) {
  if (text === undefined) return <>{`${id} `}</>;
  if (!text.includes("\n")) return <>{visible(text)}</>;
  return (
    <>
      {text.split("\n").map((line, index) => (
        <>
          {index > 0 && (
            <>
              ⏎<br />
            </>
          )}
          {visible(line)}
        </>
      ))}
    </>
  );
}

export function Broken({ found: { found, suggestion, before, recorded, anew } }: { found: ExplainedBreak }) {
  const texts = (pieces: string[] | null, ids: number[]) => (pieces ?? ids.map(String)).map(visible).join("·");
  return (
    <section class="broken" aria-label="Broken prefix">
      <h2>
        The prefix broke at token {count(found.position)}: {found.kind}
      </h2>
      <p>
        Call {found.call_index} should continue call {found.earlier}, and is other in that call's {found.inside}.
      </p>
      <dl>
        <dt>before</dt>
        <dd>{texts(before, found.before)}</dd>
        <dt>recorded</dt>
        <dd class="removed">{texts(recorded, found.recorded)}</dd>
        <dt>prompt</dt>
        <dd class="added">{texts(anew, found.found)}</dd>
      </dl>
      <p>{suggestion}</p>
    </section>
  );
}
