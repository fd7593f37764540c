// What happened when: the spans of an attempt as a tree whose bars lie on one axis, from the attempt's start to its end.
import { Fragment } from "preact";
import { useState } from "preact/hooks";
import type { Gap, RolloutView, StepView } from "../api";
import { duration, number, signed, visible } from "../format";
import { useKeys } from "../keys";
import { Code, Empty, Facts, Tag } from "../parts";

export function Timeline({ view: { steps, timeline, attempts, shown: number } }: { view: RolloutView }) {
  const [folded, setFolded] = useState<ReadonlySet<string>>(new Set());
  const [chosen, setChosen] = useState<string>();
  const shown = steps.filter((step) => !isFolded(step, steps, folded));
  const move = (by: number) => {
    const now = shown.findIndex((step) => step.span_id === chosen);
    const next = shown[Math.max(0, Math.min(shown.length - 1, now + by))];
    if (!next) return;
    setChosen(next.span_id);
    document.getElementById(`step-${next.span_id}`)?.focus();
  };
  useKeys({ j: () => move(1), k: () => move(-1) });
  if (timeline === null) return <Empty>No worker has taken it yet.</Empty>;
  const { start, gaps, stood, last_span } = timeline;
  const whole = timeline.end - start || 1;
  const bar = (part: Gap) => ({
    left: `${((part.start_time - start) / whole) * 100}%`,
    width: `${((part.end_time - part.start_time) / whole) * 100}%`,
  });
  const gapsBefore = (step: StepView | undefined) =>
    gaps
      .filter((gap) => shown.find((one) => one.start_time >= gap.end_time) === step)
      .map((gap) => (
        <li class="step gap" key={gap.start_time}>
          <span class="what">
            <i class="leaf" />
            <span class="kind">nothing recorded</span>
          </span>
          <span class="lane" aria-hidden="true">
            <b style={bar(gap)} />
          </span>
          <span class="took">{duration(gap.end_time - gap.start_time)}</span>
        </li>
      ));
  const attempt = attempts[(number ?? 0) - 1];
  const status = attempt?.status ?? "";
  const cut = ((attempt?.end_time ?? timeline.end) - start) / whole;
  const places = new Map(steps.map((step, place) => [step, place]));
  const parents = new Set(steps.map((step) => step.parent).filter((parent) => parent !== null));
  const picked = steps.find((step) => step.span_id === chosen);
  const fold = (id: string) => {
    const next = new Set(folded);
    if (!next.delete(id)) next.add(id);
    setFolded(next);
  };
  return (
    <div class={`timeline ${picked ? "with-detail" : ""}`}>
      <ol class={`steps ${stood ? "cut" : ""}`} style={{ "--cut": `${cut * 100}%` }}>
        <li class="scale" aria-hidden="true">
          <span />
          <span class="ticks">
            {[0, 0.25, 0.5, 0.75, 1].map((share) => (
              <span key={share}>{duration(share * whole)}</span>
            ))}
          </span>
        </li>
        <li class={`step whole ${status}`}>
          <span class="what">
            <i class="leaf" />
            <span class="kind">attempt {number}</span>
          </span>
          <span class="lane" aria-hidden="true">
            <i style={{ left: "0", width: "100%" }} />
            {gaps.map((gap) => (
              <b style={bar(gap)} key={gap.start_time} />
            ))}
          </span>
          <span class="took">{duration(timeline.end - start)}</span>
        </li>
        {shown.map((step) => (
          <Fragment key={step.span_id}>
          {gapsBefore(step)}
          <li class={`step ${step.kind} ${step.failed ? "failed" : ""}`}>
            <span class="what" style={{ paddingLeft: `${step.depth * 14}px` }}>
              {parents.has(places.get(step) ?? -1) ? (
                <button
                  type="button"
                  class="fold"
                  aria-expanded={!folded.has(step.span_id)}
                  aria-label={`Parts of ${step.name}`}
                  onClick={() => fold(step.span_id)}
                >
                  {folded.has(step.span_id) ? "▸" : "▾"}
                </button>
              ) : (
                <i class="leaf" />
              )}
              <button
                type="button"
                class="pick"
                id={`step-${step.span_id}`}
                aria-pressed={step.span_id === chosen}
                onClick={() => setChosen(step.span_id === chosen ? undefined : step.span_id)}
              >
                <span class="kind">{step.kind}</span> {visible(step.name)}
              </button>
              {step.span_id === last_span && <Tag>last</Tag>}
            </span>
            <span class="lane" aria-hidden="true">
              <i style={bar(step)} />
            </span>
            <span class="took">
              {step.kind === "reward" ? signed(step.reward) : duration(step.end_time - step.start_time)}
            </span>
          </li>
          </Fragment>
        ))}
        {gapsBefore(undefined)}
        {stood && <li class={`stood ${status}`}>{visible(stood)}</li>}
      </ol>
      {picked && <Detail step={picked} start={start} />}
    </div>
  );
}

function isFolded(step: StepView, steps: StepView[], folded: ReadonlySet<string>): boolean {
  for (let parent = step.parent; parent !== null;) {
    const above = steps[parent];
    if (!above) return false;
    if (folded.has(above.span_id)) return true;
    parent = above.parent;
  }
  return false;
}

function Detail({ step, start }: { step: StepView; start: number }) {
  return (
    <aside class="detail" aria-label={`Span ${step.name}`}>
      <h2>{visible(step.name)}</h2>
      {step.problem && <p class="problem">{visible(step.problem)}</p>}
      <Facts
        facts={[
          ["Kind", step.kind],
          ["Agent", step.agent],
          ["Began after", duration(step.start_time - start)],
          ["Took", duration(step.end_time - step.start_time)],
          ["First token after", step.time_to_first_token === null ? null : duration(step.time_to_first_token)],
          ["Tokens read", step.tokens_read === null ? null : number(step.tokens_read)],
          ["Tokens written", step.tokens_written === null ? null : number(step.tokens_written)],
          ["Ended by", step.finish_reason],
          ["Reward", step.reward === null ? null : signed(step.reward)],
          ["Span", step.span_id],
        ]}
      />
      {step.arguments && (
        <>
          <h3>Arguments</h3>
          <Code text={step.arguments} label="the arguments" />
        </>
      )}
      {step.result && (
        <>
          <h3>Result</h3>
          <Code text={step.result} label="the result" />
        </>
      )}
    </aside>
  );
}
