-- +goose Up
-- +goose StatementBegin

-- The first schema of this sequence. Its number is that of the last file of the one before, so that a database which has that version
-- is used as it is. An older one is migrated by fleetd of commit a749a4a.

-- Facts that all nodes of the fleet must share.
CREATE TABLE fleet (
    key   TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
);
-- The lowest schema version that a program must know to use the database: Lowest in migrations.go. A migration after which older
-- programs cannot use the database any longer raises both.
INSERT INTO fleet (key, value) VALUES ('lowest_schema', '23');

-- Nodes of the fleet, a row for each start of one: a node that was killed and is back has a lease of its own at once. It counts as alive
-- while its beat goes on: a node that sees no new beat for the time of a lease declares it lost. The clocks of two machines are never
-- compared.
CREATE TABLE nodes (
    node       TEXT COLLATE "binary" NOT NULL,
    instance   TEXT COLLATE "binary" NOT NULL,  -- one start of the node
    beat       BIGINT NOT NULL,                 -- counts up while it lives
    started_at BIGINT NOT NULL,                 -- microseconds
    version    TEXT NOT NULL,
    api        TEXT NOT NULL,                   -- base URL of its API
    devices    BIGINT NOT NULL,                 -- connected
    stamps     BOOLEAN NOT NULL DEFAULT FALSE,  -- not used
    schema     BIGINT NOT NULL DEFAULT 0,       -- the newest schema version that the node supports
    PRIMARY KEY (node, instance)
);

-- The revision of the fleet: the number of the last change. It is updated as the last statement before COMMIT of every transaction that
-- writes changes, so that its lock makes the order of commits that of the revisions. lineage is random, and another one after a restore.
CREATE TABLE fleet_revision (
    one     BIGINT NOT NULL PRIMARY KEY,  -- 1: there is one row
    n       BIGINT NOT NULL,
    lineage TEXT NOT NULL                 -- empty until the first node has set it
);
INSERT INTO fleet_revision (one, n, lineage) VALUES (1, 0, '');

-- The change log: decisions, each of one aspect of one device, or of the fleet.
CREATE TABLE changes (
    revision BIGINT NOT NULL PRIMARY KEY,
    id       TEXT COLLATE "binary" NOT NULL,  -- random; what is tried again has the same
    device   TEXT COLLATE "binary" NOT NULL,  -- empty: of the fleet
    aspect   TEXT NOT NULL,
    value    TEXT NOT NULL,                   -- JSON
    who      TEXT NOT NULL,
    at       BIGINT NOT NULL                  -- microseconds
);
CREATE INDEX changes_device ON changes (device, revision);

-- Devices of the fleet. What is decided of them (admission to revision) is the state folded from their changes, and written in the same
-- transaction. What they report at an OTA check (board to activate_v2) is written later, and an older checked_at replaces nothing. Written
-- by fleetd only: a row changed here is overwritten by the next save of a running node.
CREATE TABLE devices (
    device              TEXT COLLATE "binary" NOT NULL CONSTRAINT registry_pkey PRIMARY KEY,  -- as older databases name it
    admission           TEXT NOT NULL,                   -- member, revoked
    client_id           TEXT NOT NULL,                   -- the admitted Client-Id; empty: the first that comes is admitted
    name                TEXT NOT NULL,
    name_folded         TEXT COLLATE "binary" NOT NULL,  -- in lower case
    labels              TEXT NOT NULL,                   -- JSON object, keys sorted, no spaces; device_labels has a row for each
    preferred_transport TEXT NOT NULL,                   -- websocket, mqtt; empty: the node's default
    joined              TEXT NOT NULL,                   -- the transport offered to a device that joined by itself; empty once somebody decided about it, or it connected
    revision            BIGINT NOT NULL,                 -- of its last change
    board               TEXT COLLATE "binary" NOT NULL,
    board_folded        TEXT COLLATE "binary" NOT NULL,  -- in lower case
    firmware            TEXT COLLATE "binary" NOT NULL,  -- version
    firmware_key        TEXT COLLATE "binary" NOT NULL,  -- sorts as the firmware compares versions; empty: it could not read this one
    elf_sha256          TEXT NOT NULL,                   -- of the running image
    chip                TEXT NOT NULL,
    language            TEXT NOT NULL,
    serial              TEXT NOT NULL,
    activate_v2         BOOLEAN NOT NULL,
    first_seen          BIGINT NOT NULL,                 -- microseconds
    checked_at          BIGINT NOT NULL,                 -- last OTA check, microseconds
    search              TEXT COLLATE "binary" GENERATED ALWAYS AS (device || '|' || name_folded || '|' || board_folded) STORED
);
CREATE INDEX devices_search ON devices (device, search);
CREATE INDEX devices_name ON devices (name_folded, device);
CREATE INDEX devices_board ON devices (board, device);
CREATE INDEX devices_firmware ON devices (firmware, device);
CREATE INDEX devices_revoked ON devices (device) WHERE admission <> 'member';
CREATE INDEX devices_joined ON devices (first_seen) WHERE joined <> '';

CREATE TABLE device_labels (
    key    TEXT COLLATE "binary" NOT NULL,
    value  TEXT COLLATE "binary" NOT NULL,
    device TEXT COLLATE "binary" NOT NULL,
    PRIMARY KEY (key, value, device)
);

-- Devices whose credentials are not those of generation 0 (rotated, revoked or forgotten), or with refused clients. Rows of devices that
-- are known mirror what is decided of them; a row without a device is that of one which was forgotten.
CREATE TABLE credential_exceptions (
    device         TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    generation     BIGINT NOT NULL,
    revoked        BOOLEAN NOT NULL,
    reason         TEXT NOT NULL,
    changed_at     BIGINT NOT NULL,            -- microseconds
    previous       BIGINT NOT NULL DEFAULT 0,  -- the generation before a rotation, which stays valid until previous_until, or until the device has come with the new one
    previous_until BIGINT NOT NULL DEFAULT 0,  -- microseconds; 0: none is valid
    refused        TEXT NOT NULL DEFAULT ''    -- JSON array of the Client-Ids that an operator refused; empty: none
);

-- Keys that the operator has burnt into chips: a signature with one proves that chip. A serial number proves one device at most, and a
-- device is proven by one serial number at most.
CREATE TABLE attestation_keys (
    serial      TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    device      TEXT COLLATE "binary" NOT NULL,  -- empty until the first proof, unless imported
    sealed      TEXT NOT NULL,                   -- the key, encrypted with one that derives from the fleet's secret
    imported_at BIGINT NOT NULL,                 -- microseconds
    bound_at    BIGINT NOT NULL                  -- microseconds; 0: not bound
);
CREATE UNIQUE INDEX attestation_keys_device ON attestation_keys (device) WHERE device <> '';

-- The newest known connection of each device; a pair (epoch, seq) that is not above the stored one changes nothing. Every device has a
-- row from its beginning: a page of those that are offline is otherwise no range of any index.
CREATE TABLE presence (
    device          TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    epoch           BIGINT NOT NULL,
    seq             BIGINT NOT NULL,
    online          BOOLEAN NOT NULL,
    node            TEXT NOT NULL,
    session         TEXT NOT NULL,
    client_id       TEXT NOT NULL,
    transport       TEXT NOT NULL,
    reason          TEXT NOT NULL,             -- why the last session ended
    connected_at    BIGINT NOT NULL,           -- microseconds
    last_seen       BIGINT NOT NULL,           -- microseconds
    mcp_state       TEXT NOT NULL,
    mcp_error       TEXT NOT NULL,
    catalog         TEXT NOT NULL,             -- catalogs.sha256; empty if unknown
    catalog_partial BOOLEAN NOT NULL,
    tool_count      BIGINT NOT NULL,
    generation      BIGINT NOT NULL DEFAULT 0, -- of the credentials that the connection came with
    offline_since   BIGINT NOT NULL DEFAULT 0  -- microseconds; 0: it is online, or never was
);
CREATE INDEX presence_online ON presence (device) WHERE online;
CREATE INDEX presence_offline ON presence (device) WHERE NOT online;
CREATE INDEX presence_node ON presence (node COLLATE "binary", device) WHERE online;
CREATE INDEX presence_transport ON presence (transport COLLATE "binary", device) WHERE online;
CREATE INDEX presence_reason ON presence (reason COLLATE "binary", device) WHERE NOT online;
CREATE INDEX presence_last_seen ON presence (last_seen, device) WHERE NOT online;
CREATE INDEX presence_offline_since ON presence (offline_since, device) WHERE NOT online;
CREATE INDEX presence_catalog ON presence (catalog COLLATE "binary", device) WHERE catalog <> '';

-- How many devices have which value, kept in the transactions that change it. The number is the sum over the slots, which keep nodes out
-- of each other's way.
CREATE TABLE fleet_counts (
    dimension TEXT COLLATE "binary" NOT NULL,  -- state, offline_reason, transport, board, firmware, node, mcp_state, catalog
    value     TEXT COLLATE "binary" NOT NULL,
    slot      BIGINT NOT NULL,
    n         BIGINT NOT NULL,                 -- below zero where another slot counted the device
    PRIMARY KEY (dimension, value, slot)
);
INSERT INTO fleet_counts (dimension, value, slot, n) VALUES ('state', 'revoked', 0, 0);

-- Tool lists, each stored once however many devices have it.
CREATE TABLE catalogs (
    sha256     TEXT COLLATE "binary" NOT NULL PRIMARY KEY,  -- of the list's bytes
    tools      TEXT NOT NULL,                               -- JSON array exactly as the device sent it
    encoding   TEXT NOT NULL,                               -- text; base64 if the bytes are not valid text
    tool_count BIGINT NOT NULL,
    bytes      BIGINT NOT NULL,
    first_seen BIGINT NOT NULL,                             -- microseconds
    -- When a device last had the list, as nodes note about once an hour, in microseconds: one that nobody has had for long, and no
    -- history entry names, may be deleted. It is in the row itself to protect a list that is about to be named: the delete reads it
    -- again once it has locked the row.
    used_at    BIGINT NOT NULL DEFAULT 0
);

-- Which device had which catalog under which firmware, from when on.
CREATE TABLE catalog_history (
    device     TEXT COLLATE "binary" NOT NULL,
    epoch      BIGINT NOT NULL,
    seq        BIGINT NOT NULL,
    catalog    TEXT NOT NULL,     -- catalogs.sha256
    firmware   TEXT NOT NULL,
    elf_sha256 TEXT NOT NULL,
    partial    BOOLEAN NOT NULL,  -- the list could not be read to its end
    at         BIGINT NOT NULL,   -- microseconds
    PRIMARY KEY (device, epoch, seq)
);
CREATE INDEX catalog_history_catalog ON catalog_history (catalog COLLATE "binary"); -- which entries name a list

-- API keys, those that have ended included: the audit names them. The token itself is not stored; the document has its SHA-256.
CREATE TABLE api_keys (
    id            TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    document      TEXT NOT NULL,             -- JSON: name, hash, scopes, devices, tools, created, expires
    revoked_at    BIGINT NOT NULL,           -- microseconds; 0: it was not revoked
    console_until BIGINT NOT NULL DEFAULT 0  -- microseconds; when a console key ends, whatever its parent does, and is deleted some time after; 0: another key
);

-- One-time codes of the console; a row is deleted when the code is used.
CREATE TABLE console_codes (
    hash       TEXT COLLATE "binary" NOT NULL PRIMARY KEY,  -- SHA-256 of the code, hex
    document   TEXT NOT NULL,                               -- JSON: the key that it gives, without id and token
    expires_at BIGINT NOT NULL                              -- microseconds
);

-- Every version of the tool guard's policy; the highest is in force.
CREATE TABLE policies (
    version  BIGINT NOT NULL PRIMARY KEY,
    document TEXT NOT NULL,    -- JSON
    at       BIGINT NOT NULL,  -- microseconds
    author   TEXT NOT NULL
);

-- The audit, a row per group of entries. Each row names the hash of the one before it of the same run, so that none can be taken out.
CREATE TABLE audit_blocks (
    run       TEXT COLLATE "binary" NOT NULL,  -- one start of one node
    first_seq BIGINT NOT NULL,                 -- of the run, from 1
    last_seq  BIGINT NOT NULL,
    node      TEXT NOT NULL,
    first_at  BIGINT NOT NULL,                 -- microseconds; the range of the entries' times
    last_at   BIGINT NOT NULL,
    entries   TEXT NOT NULL,                   -- a line of JSON each
    previous  TEXT NOT NULL,                   -- hex; empty for the first row of a run
    hash      TEXT NOT NULL,                   -- HMAC-SHA-256 over all of the above
    PRIMARY KEY (run, first_seq)
);
CREATE INDEX audit_blocks_by_time ON audit_blocks (last_at, run, first_seq);

-- The index of the photos in the object store, which has the pictures and is the truth: a row may be missing or too many for a while. Ids
-- sort by time.
CREATE TABLE photos (
    id       TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    device   TEXT COLLATE "binary" NOT NULL,
    question TEXT NOT NULL,
    bytes    BIGINT NOT NULL,
    sha256   TEXT NOT NULL,
    kind     TEXT NOT NULL,
    taken_at BIGINT NOT NULL  -- microseconds
);
CREATE INDEX photos_by_device ON photos (device, id);

-- Jobs: an action for a selection of devices. Columns are the members of jobs.Job; every transaction that changes tasks of a job locks its
-- row first, and writes it.
CREATE TABLE jobs (
    job          TEXT COLLATE "binary" NOT NULL PRIMARY KEY,  -- sorts by time
    owner        TEXT COLLATE "binary" NOT NULL,              -- id of the creator's key
    owner_name   TEXT NOT NULL,
    idem         TEXT COLLATE "binary" NOT NULL,              -- Idempotency-Key; empty: none, or it has expired
    hash         TEXT NOT NULL,                               -- of the body with that key
    action       TEXT NOT NULL,                               -- call, message, restart
    spec         TEXT NOT NULL,                               -- JSON
    confirmed    TEXT NOT NULL,                               -- JSON array of rules
    devices      TEXT NOT NULL,                               -- the selection, limited to the creator's devices
    created_at   BIGINT NOT NULL,                             -- microseconds
    state        TEXT NOT NULL,                               -- scheduled, preparing, running, paused, halted, done, cancelled
    reason       TEXT NOT NULL,
    prior        TEXT NOT NULL,                               -- the state to which a paused or halted job returns
    version      BIGINT NOT NULL,                             -- raised by every change
    ready_at     BIGINT NOT NULL,                             -- before this time none of its tasks may begin, unless the row changes
    stage        BIGINT NOT NULL,
    stage_end    BIGINT NOT NULL,
    opened       BIGINT NOT NULL,
    started      BIGINT NOT NULL,
    passed_ok    BIGINT NOT NULL,
    round        BIGINT NOT NULL,
    round_n      BIGINT NOT NULL,
    next_at      BIGINT NOT NULL,
    prepared_to  TEXT NOT NULL,                               -- of preparing: the last device that has its row
    tat          BIGINT NOT NULL,                             -- theoretical arrival time of the rate
    missed       BIGINT NOT NULL,
    waiting      BIGINT NOT NULL,                             -- tasks, over all rounds; what follows alike
    running      BIGINT NOT NULL,
    n_ok         BIGINT NOT NULL,
    n_failed     BIGINT NOT NULL,
    n_unknown    BIGINT NOT NULL,
    n_refused    BIGINT NOT NULL,
    n_expired    BIGINT NOT NULL,
    n_cancelled  BIGINT NOT NULL,
    n_already    BIGINT NOT NULL,
    n_superseded BIGINT NOT NULL,
    n_gone       BIGINT NOT NULL,
    begun_at     BIGINT NOT NULL,
    until        BIGINT NOT NULL,
    ended_at     BIGINT NOT NULL,                             -- 0: it is open
    held         BIGINT NOT NULL DEFAULT 0,                   -- waiting tasks of the current round that have begun before: they keep their places in the stage, and started goes on counting them
    reserved     BIGINT NOT NULL DEFAULT 0                    -- tasks that a job which is preparing may still write: they count as its key's already
);
CREATE UNIQUE INDEX jobs_idem ON jobs (owner, idem) WHERE idem <> '';
CREATE INDEX jobs_ended ON jobs (ended_at, job);
CREATE INDEX jobs_owner ON jobs (owner, ended_at, job);

-- Tasks: a job for one device in one round.
CREATE TABLE tasks (
    job      TEXT COLLATE "binary" NOT NULL,
    device   TEXT COLLATE "binary" NOT NULL,
    round    BIGINT NOT NULL,
    seq      BIGINT NOT NULL,                 -- order in the queue of the device, then by job
    spread   BIGINT NOT NULL,                 -- order among the tasks of the job
    state    TEXT NOT NULL,                   -- waiting, running, ended
    due_at   BIGINT NOT NULL,                 -- microseconds; 0: at once
    attempt  BIGINT NOT NULL,
    fence    BIGINT NOT NULL,                 -- how often it was begun
    instance TEXT COLLATE "binary" NOT NULL,  -- of the process that began it last
    node     TEXT NOT NULL,
    call_id  TEXT NOT NULL,
    outcome  TEXT NOT NULL,                   -- empty: it is open
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

-- Confirmations that were asked of a person for a whole job, each to be used once. Those of one key are limited; the oldest are deleted.
CREATE TABLE job_confirmations (
    digest TEXT COLLATE "binary" NOT NULL PRIMARY KEY,  -- of the token
    owner  TEXT NOT NULL,
    hash   TEXT NOT NULL,                               -- of the job's body
    rules  TEXT NOT NULL,                               -- JSON array
    until  BIGINT NOT NULL                              -- microseconds
);
CREATE INDEX job_confirmations_until ON job_confirmations (until);
CREATE INDEX job_confirmations_owner ON job_confirmations (owner, until);

-- Webhooks: events of the fleet that are delivered to an address. Columns up to version are what people set; the others are written by the
-- node that delivers.
CREATE TABLE webhooks (
    id            TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    owner         TEXT NOT NULL,             -- id of the creator's key
    owner_name    TEXT NOT NULL,
    url           TEXT NOT NULL,
    types         TEXT NOT NULL,             -- JSON array
    devices       TEXT NOT NULL,             -- a selection; empty: all
    offline_for   BIGINT NOT NULL,           -- microseconds; 0: offline is delivered at once
    sealed        TEXT NOT NULL,             -- the secret
    created_at    BIGINT NOT NULL,           -- microseconds
    version       BIGINT NOT NULL,           -- raised by every change of the above
    position      TEXT NOT NULL,             -- of the last event that was delivered or left out; empty: none
    gap           TEXT NOT NULL,             -- JSON array of what was deleted before it was delivered; empty: nothing
    delivered     BIGINT NOT NULL,           -- deliveries
    delivered_at  BIGINT NOT NULL,           -- of the last one
    failing_since BIGINT NOT NULL,           -- 0: the last attempt was successful
    last_error    TEXT NOT NULL,
    instance      TEXT NOT NULL,             -- of the process that delivers
    beat          BIGINT NOT NULL,           -- its lease ends when it does not raise the number for as long as that lasts, by the clock of who watches
    disabled_at   BIGINT NOT NULL DEFAULT 0  -- microseconds; since when it is not delivered, after it failed for days, until somebody enables it; 0: it is enabled
);

-- Devices whose absence was reported to a webhook with offline_for.
CREATE TABLE webhook_offline (
    webhook TEXT COLLATE "binary" NOT NULL,
    device  TEXT COLLATE "binary" NOT NULL,
    since   BIGINT NOT NULL,                 -- presence.offline_since
    ended   BOOLEAN NOT NULL DEFAULT FALSE,  -- the return was delivered, or the absence was left out
    PRIMARY KEY (webhook, device)
);
-- +goose StatementEnd
