-- +goose Up
-- +goose StatementBegin

-- Rolling out firmware. A firmware task belongs to its row, and whichever node sees the next check, download or connection moves it on.
ALTER TABLE jobs ADD COLUMN bundle TEXT COLLATE "binary" NOT NULL DEFAULT '';      -- id of the group of jobs that one release was rolled out with; empty: none
ALTER TABLE jobs ADD COLUMN harmed BIGINT NOT NULL DEFAULT 0;                      -- open tasks that the stop rule counts as failed already
ALTER TABLE jobs ADD COLUMN provable BIGINT NOT NULL DEFAULT 0;                    -- open and successful tasks of devices that stay connected
ALTER TABLE jobs ADD COLUMN astray BIGINT NOT NULL DEFAULT 0;                      -- devices that were lost after an image that names another server
ALTER TABLE tasks ADD COLUMN phase TEXT NOT NULL DEFAULT '';                       -- of a running firmware task: called, offered, loading, booting, proving
ALTER TABLE tasks ADD COLUMN limit_at BIGINT NOT NULL DEFAULT 0;                   -- when the phase ends by itself, microseconds
ALTER TABLE tasks ADD COLUMN elf_before TEXT COLLATE "binary" NOT NULL DEFAULT ''; -- what the device ran when its firmware task began
ALTER TABLE tasks ADD COLUMN elf_target TEXT COLLATE "binary" NOT NULL DEFAULT ''; -- what it is to run; empty: the task has not begun, or is no firmware task
ALTER TABLE tasks ADD COLUMN rollout TEXT NOT NULL DEFAULT '';                     -- JSON: jobs.Rollout; empty: the task has not begun, or is no firmware task
CREATE INDEX jobs_bundle ON jobs (bundle) WHERE bundle <> '';
CREATE INDEX tasks_phase ON tasks (limit_at) WHERE phase <> '';
CREATE INDEX tasks_target ON tasks (device) WHERE elf_target <> '';

-- Devices that get no firmware, and devices whose new image may not be confirmed yet.
CREATE TABLE firmware_devices (
    device         TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    barred_until   BIGINT NOT NULL,  -- microseconds; 0: it is not barred
    reason         TEXT NOT NULL,    -- of the bar, a sentence
    unconfirmed_at BIGINT NOT NULL   -- when it got the last byte of an image without a check since; 0: it has checked
);
-- +goose StatementEnd
