// What a person can do to a run: rename, tag, stop, delete. Each is shown to those who may.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { RunRow } from "../api";
import { useKeys } from "../keys";
import { Refused, request } from "../request";
import { go, href } from "../route";
import { may, whyNot } from "../session";

type Form = "rename" | "tag" | "delete";

export function RunActions({ run }: { run: RunRow }) {
  const [problem, setProblem] = useState("");
  const [form, setForm] = useState<Form>();
  useKeys(form ? { Escape: () => setForm(undefined) } : {});
  const path = `runs/${encodeURIComponent(run.run_id)}`;
  const attempt = async (work: () => Promise<unknown>) => {
    try {
      await work();
      setProblem("");
      setForm(undefined);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      setProblem(error.message);
    }
  };
  const merge = (changes: object) => void attempt(() => request("PATCH", path, { merge: changes }));
  const opener = (name: Form, title: string) => (
    <button type="button" aria-expanded={form === name} onClick={() => setForm(form === name ? undefined : name)}>
      {title}
    </button>
  );
  if (!may("trainer")) return <HowElse run={run} />;
  return (
    <div class="actions">
      {problem && <span role="alert">{problem}</span>}
      {run.status === "running" && (
        <button
          type="button"
          disabled={run.stopping}
          title="It ends after its step, and saves what it has trained"
          onClick={() => merge({ stop: true })}
        >
          {run.stopping ? "Stopping" : "Stop"}
        </button>
      )}
      {opener("rename", "Rename")}
      {opener("tag", "Tag")}
      {may("admin") && run.status !== "running" && opener("delete", "Delete")}
      {form === "rename" && (
        <Popover save={(name) => merge({ name: name || null })} button="Save name" initial={run.name ?? ""}>
          Name
        </Popover>
      )}
      {form === "tag" && (
        <Popover save={(text) => merge({ tags: tagsOf(text) })} button="Save tags" initial={run.tags.join(", ")}>
          Tags, with commas between
        </Popover>
      )}
      {form === "delete" && (
        <div class="popover" role="group" aria-label="Delete this run">
          <p>Delete this run with its rollouts, spans and metrics? This cannot be undone.</p>
          <button
            type="button"
            class="main"
            ref={focus}
            onClick={() =>
              void attempt(async () => {
                await request("DELETE", path);
                go(href(["runs"]));
              })
            }
          >
            Delete run
          </button>
        </div>
      )}
    </div>
  );
}

function tagsOf(text: string): string[] {
  const given = text.split(",").map((tag) => tag.trim());
  return [...new Set(given.filter(Boolean))];
}

/** Where this page only reads, the commands that change a run. */
function HowElse({ run }: { run: RunRow }) {
  if (whyNot("trainer") !== "this page only reads") return null;
  const verbs = [`rename ${run.run_id} NAME`, `tag ${run.run_id} TAG`, `delete ${run.run_id}`];
  const commands = run.status === "running" ? [`stop ${run.run_id}`, ...verbs.slice(0, 2)] : verbs;
  return (
    <details class="how">
      <summary>Rename, tag, {run.status === "running" ? "stop" : "delete"}</summary>
      <div class="popover">
        <p>This page only reads. In a terminal:</p>
        {commands.map((command) => (
          <code key={command}>agl runs {command}</code>
        ))}
      </div>
    </details>
  );
}

function focus(field: HTMLElement | null): void {
  field?.focus();
}

interface PopoverProperties {
  initial: string;
  button: string;
  save: (text: string) => void;
  children: ComponentChildren;
}

function Popover({ initial, button, save, children }: PopoverProperties) {
  const [text, setText] = useState(initial);
  return (
    <form
      class="popover"
      onSubmit={(event) => {
        event.preventDefault();
        save(text.trim());
      }}
    >
      <label>
        {children}
        <input value={text} onInput={(event) => setText(event.currentTarget.value)} ref={focus} />
      </label>
      <button type="submit" class="main">
        {button}
      </button>
    </form>
  );
}
