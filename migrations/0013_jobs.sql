-- +goose Up

-- Jobs: an action for a selection of devices. Columns are the members of jobs.Job;
-- every transaction that changes tasks of a job locks its row first, and writes it.
CREATE TABLE jobs (
    job         TEXT COLLATE "binary" NOT NULL PRIMARY KEY, -- sorts by time
    owner       TEXT COLLATE "binary" NOT NULL, -- id of the creator's key
    owner_name  TEXT NOT NULL,
    idem        TEXT COLLATE "binary" NOT NULL, -- Idempotency-Key; empty: none, or it has expired
    hash        TEXT NOT NULL,   -- of the body with that key
    action      TEXT NOT NULL,   -- call, message, restart
    spec        TEXT NOT NULL,   -- JSON
    confirmed   TEXT NOT NULL,   -- JSON array of rules
    devices     TEXT NOT NULL,   -- the selection, limited to the creator's devices
    created_at  BIGINT NOT NULL, -- microseconds
    state       TEXT NOT NULL,   -- scheduled, preparing, running, paused, halted, done, cancelled
    reason      TEXT NOT NULL,
    prior       TEXT NOT NULL,   -- the state to which a paused or halted job returns
    version     BIGINT NOT NULL, -- raised by every change
    ready_at    BIGINT NOT NULL, -- before this time none of its tasks may begin, unless the row changes
    stage       BIGINT NOT NULL,
    stage_end   BIGINT NOT NULL,
    opened      BIGINT NOT NULL,
    started     BIGINT NOT NULL,
    passed_ok   BIGINT NOT NULL,
    round       BIGINT NOT NULL,
    round_n     BIGINT NOT NULL,
    next_at     BIGINT NOT NULL,
    prepared_to TEXT NOT NULL,   -- of preparing: the last device that has its row
    tat         BIGINT NOT NULL, -- theoretical arrival time of the rate
    missed      BIGINT NOT NULL,
    waiting     BIGINT NOT NULL, -- tasks, over all rounds; what follows alike
    running     BIGINT NOT NULL,
    n_ok         BIGINT NOT NULL,
    n_failed     BIGINT NOT NULL,
    n_unknown    BIGINT NOT NULL,
    n_refused    BIGINT NOT NULL,
    n_expired    BIGINT NOT NULL,
    n_cancelled  BIGINT NOT NULL,
    n_already    BIGINT NOT NULL,
    n_superseded BIGINT NOT NULL,
    n_gone       BIGINT NOT NULL,
    begun_at    BIGINT NOT NULL,
    until       BIGINT NOT NULL,
    ended_at    BIGINT NOT NULL  -- 0: it is open
);
CREATE UNIQUE INDEX jobs_idem ON jobs (owner, idem) WHERE idem <> '';
CREATE INDEX jobs_ended ON jobs (ended_at, job);

-- Tasks: a job for one device in one round.
CREATE TABLE tasks (
    job      TEXT COLLATE "binary" NOT NULL,
    device   TEXT COLLATE "binary" NOT NULL,
    round    BIGINT NOT NULL,
    seq      BIGINT NOT NULL, -- order in the queue of the device, then by job
    spread   BIGINT NOT NULL, -- order among the tasks of the job
    state    TEXT NOT NULL,   -- waiting, running, ended
    due_at   BIGINT NOT NULL, -- microseconds; 0: at once
    attempt  BIGINT NOT NULL,
    fence    BIGINT NOT NULL, -- how often it was begun
    instance TEXT COLLATE "binary" NOT NULL, -- of the process that began it last
    node     TEXT NOT NULL,
    call_id  TEXT NOT NULL,
    outcome  TEXT NOT NULL,   -- empty: it is open
    code     TEXT NOT NULL,
    detail   TEXT NOT NULL,
    result   TEXT NOT NULL,
    late     BOOLEAN NOT NULL,
    begun_at BIGINT NOT NULL,
    ended_at BIGINT NOT NULL,
    PRIMARY KEY (job, device, round)
);
CREATE UNIQUE INDEX tasks_one ON tasks (device) WHERE state = 'running';
CREATE INDEX tasks_queue ON tasks (device, seq, job) WHERE state = 'waiting';
CREATE INDEX tasks_spread ON tasks (job, spread) WHERE state = 'waiting';
CREATE INDEX tasks_running ON tasks (instance) WHERE state = 'running';

-- Confirmations that were asked of a person for a whole job, each to be used once.
CREATE TABLE job_confirmations (
    digest TEXT COLLATE "binary" NOT NULL PRIMARY KEY, -- of the token
    owner  TEXT NOT NULL,
    hash   TEXT NOT NULL,   -- of the job's body
    rules  TEXT NOT NULL,   -- JSON array
    until  BIGINT NOT NULL  -- microseconds
);
CREATE INDEX job_confirmations_until ON job_confirmations (until);
