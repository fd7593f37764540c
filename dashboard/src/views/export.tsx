// Rollouts as a file: those that the view shows now.
import { useState } from "preact/hooks";
import type { Filter } from "../api";
import { Refused } from "../request";

const FORMATS = { rollouts: "JSON lines", csv: "CSV", sft: "SFT data", dpo: "DPO pairs" } as const;

/** `rolloutIds`: these, where a filter does not say which. */
export function Export({ filter, rolloutIds }: { filter: Filter | undefined; rolloutIds?: string[] | undefined }) {
  const [problem, setProblem] = useState("");
  const save = async (format: string) => {
    setProblem("");
    try {
      await download({ format, where: filter, rollout_ids: rolloutIds });
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      setProblem(error.message);
    }
  };
  return (
    <>
      {problem && <span role="alert">{problem}</span>}
      <select
        aria-label="Export these rollouts"
        value=""
        onChange={(event) => {
          const format = event.currentTarget.value;
          event.currentTarget.value = "";
          void save(format);
        }}
      >
        <option value="" disabled>
          {rolloutIds ? `Export these ${rolloutIds.length}…` : "Export…"}
        </option>
        {Object.entries(FORMATS).map(([format, name]) => (
          <option value={format} key={format}>
            {name}
          </option>
        ))}
      </select>
    </>
  );
}

async function download(body: unknown): Promise<void> {
  const answer = await fetch("api/v1/dashboard/export", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!answer.ok) {
    const said = (await answer.json().catch(() => null)) as { error?: { message?: string } } | null;
    throw new Refused(answer.status, said?.error?.message ?? `the server answered ${answer.status}`);
  }
  const name = /filename="?([^";]+)/.exec(answer.headers.get("content-disposition") ?? "")?.[1] ?? "rollouts";
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
