// What a person can do to a rollout: cancel, run again, tag, annotate, score. Each is shown to those who may.
import { useState } from "preact/hooks";
import type { Rollout } from "../api";
import { useKeys } from "../keys";
import { Refused, request } from "../request";
import { go, href } from "../route";
import { may, whyNot } from "../session";

const ENDED = ["succeeded", "failed", "cancelled"];

export function Actions({ rollout, reload }: { rollout: Rollout; reload: () => void }) {
  const [problem, setProblem] = useState("");
  const [form, setForm] = useState<"tags" | "annotation" | "score">();
  useKeys(form ? { Escape: () => setForm(undefined) } : {});
  const path = `rollouts/${encodeURIComponent(rollout.rollout_id)}`;
  const attempt = async (work: () => Promise<unknown>) => {
    try {
      await work();
      setProblem("");
      setForm(undefined);
      reload();
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      setProblem(error.message);
    }
  };
  const ended = ENDED.includes(rollout.status);
  return (
    <div class="actions">
      {problem && <span role="alert">{problem}</span>}
      {may("trainer") && (
        <>
          {!ended && (
            <button type="button" onClick={() => void attempt(() => request("POST", `${path}/cancel`, {}))}>
              Cancel
            </button>
          )}
          <button type="button" onClick={() => void attempt(() => runAgain(rollout, ended))}>
            Retry
          </button>
          <button
            type="button"
            aria-expanded={form === "tags"}
            onClick={() => setForm(form === "tags" ? undefined : "tags")}
          >
            Tag
          </button>
          <button
            type="button"
            aria-expanded={form === "annotation"}
            onClick={() => setForm(form === "annotation" ? undefined : "annotation")}
          >
            Annotate
          </button>
        </>
      )}
      {!may("trainer") && (
        <span class="muted">
          Nothing can be changed or annotated here: {whyNot("trainer")}.
          {whyNot("trainer") === "this page only reads" && (
            <>
              {" "}
              In a terminal: <code>agl rollouts annotate {rollout.rollout_id} --label good</code>
            </>
          )}
        </span>
      )}
      {may("grader") && (
        <button
          type="button"
          aria-expanded={form === "score"}
          onClick={() => setForm(form === "score" ? undefined : "score")}
        >
          Score
        </button>
      )}
      {form === "tags" && (
        <TagForm
          tags={rollout.metadata.tags ?? []}
          save={(tags) => void attempt(() => request("PATCH", path, { metadata: { ...rollout.metadata, tags } }))}
        />
      )}
      {form === "annotation" && (
        <AnnotationForm
          given={rollout.metadata.annotation ?? {}}
          save={(parts) => void attempt(() => request("POST", `dashboard/${path}/annotation`, parts))}
        />
      )}
      {form === "score" && (
        <ScoreForm save={(score) => void attempt(() => request("POST", `dashboard/${path}/score`, score))} />
      )}
    </div>
  );
}

/** One that has ended is final: a new rollout of the same task runs instead, outside the run's training. */
async function runAgain(rollout: Rollout, ended: boolean): Promise<void> {
  if (!ended) {
    await request("PATCH", `rollouts/${encodeURIComponent(rollout.rollout_id)}`, { status: "requeuing" });
    return;
  }
  const { input, mode, resources_id, config, metadata, rollout_id } = rollout;
  const again = { input, mode, resources_id, config, metadata: { ...metadata, retry_of: rollout_id } };
  const [made] = await request<Rollout[]>("POST", "rollouts", { requests: [again] });
  if (made) go(href(["rollouts", made.rollout_id]));
}

/** Called once, when the field appears. */
function focus(field: HTMLElement | null): void {
  field?.focus();
}

function TagForm({ tags, save }: { tags: string[]; save: (tags: string[]) => void }) {
  const [text, setText] = useState(tags.join(", "));
  const given = text
    .split(",")
    .map((tag) => tag.trim())
    .filter(Boolean);
  return (
    <form
      class="popover"
      onSubmit={(event) => {
        event.preventDefault();
        save([...new Set(given)]);
      }}
    >
      <label>
        Tags, with commas between
        <input value={text} onInput={(event) => setText(event.currentTarget.value)} ref={focus} />
      </label>
      <button type="submit" class="main">
        Save tags
      </button>
    </form>
  );
}

const PARTS = ["label", "note", "answer"] as const;
export type Annotation = Partial<Record<(typeof PARTS)[number], string>>;

function AnnotationForm({ given, save }: { given: Annotation; save: (parts: Annotation) => void }) {
  const [parts, setParts] = useState<Annotation>(given);
  const field = (name: keyof Annotation) => ({
    value: parts[name] ?? "",
    onInput: (event: { currentTarget: { value: string } }) => setParts({ ...parts, [name]: event.currentTarget.value }),
  });
  return (
    <form
      class="popover"
      onSubmit={(event) => {
        event.preventDefault();
        save(Object.fromEntries(PARTS.map((name) => [name, parts[name] ?? ""])));
      }}
    >
      <label>
        Label, such as good
        <input {...field("label")} ref={focus} />
      </label>
      <label>
        Note
        <textarea rows={3} {...field("note")} />
      </label>
      <label>
        Corrected answer, which exports teach instead
        <textarea rows={3} {...field("answer")} />
      </label>
      <button type="submit" class="main">
        Save annotation
      </button>
    </form>
  );
}

function ScoreForm({ save }: { save: (score: { reward: number | null; comment?: string }) => void }) {
  const [reward, setReward] = useState("");
  const [comment, setComment] = useState("");
  return (
    <form
      class="popover"
      onSubmit={(event) => {
        event.preventDefault();
        save({ reward: reward === "" ? null : Number(reward), ...(comment ? { comment } : {}) });
      }}
    >
      <label>
        Reward, which replaces the present one
        <input
          type="number"
          step="any"
          value={reward}
          onInput={(event) => setReward(event.currentTarget.value)}
          ref={focus}
        />
      </label>
      <label>
        Comment
        <textarea rows={3} value={comment} onInput={(event) => setComment(event.currentTarget.value)} />
      </label>
      <button type="submit" class="main" disabled={reward === "" && !comment}>
        Save score
      </button>
    </form>
  );
}
