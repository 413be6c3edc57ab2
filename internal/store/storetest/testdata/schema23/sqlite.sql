-- sqlite_master of a database that the migrations up to version 23 of commit a749a4a made.
CREATE TABLE api_keys (
    id         TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    document   TEXT NOT NULL,
    revoked_at BIGINT NOT NULL
, console_until BIGINT NOT NULL DEFAULT 0);
CREATE TABLE attestation_keys (
    serial      TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    device      TEXT COLLATE "binary" NOT NULL,
    sealed      TEXT NOT NULL,
    imported_at BIGINT NOT NULL,
    bound_at    BIGINT NOT NULL
);
CREATE TABLE audit_blocks (
    run       TEXT COLLATE "binary" NOT NULL,
    first_seq BIGINT NOT NULL,
    last_seq  BIGINT NOT NULL,
    node      TEXT NOT NULL,
    first_at  BIGINT NOT NULL,
    last_at   BIGINT NOT NULL,
    entries   TEXT NOT NULL,
    previous  TEXT NOT NULL,
    hash      TEXT NOT NULL,
    PRIMARY KEY (run, first_seq)
);
CREATE TABLE catalog_history (
    device     TEXT COLLATE "binary" NOT NULL,
    epoch      BIGINT NOT NULL,
    seq        BIGINT NOT NULL,
    catalog    TEXT NOT NULL,
    firmware   TEXT NOT NULL,
    elf_sha256 TEXT NOT NULL,
    partial    BOOLEAN NOT NULL,
    at         BIGINT NOT NULL,
    PRIMARY KEY (device, epoch, seq)
);
CREATE TABLE catalogs (
    sha256     TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    tools      TEXT NOT NULL,
    encoding   TEXT NOT NULL,
    tool_count BIGINT NOT NULL,
    bytes      BIGINT NOT NULL,
    first_seen BIGINT NOT NULL
, used_at BIGINT NOT NULL DEFAULT 0);
CREATE TABLE changes (
    revision BIGINT NOT NULL PRIMARY KEY,
    id       TEXT COLLATE "binary" NOT NULL,
    device   TEXT COLLATE "binary" NOT NULL,
    aspect   TEXT NOT NULL,
    value    TEXT NOT NULL,
    who      TEXT NOT NULL,
    at       BIGINT NOT NULL
);
CREATE TABLE console_codes (
    hash       TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    document   TEXT NOT NULL,
    expires_at BIGINT NOT NULL
);
CREATE TABLE credential_exceptions (
    device     TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    generation BIGINT NOT NULL,
    revoked    BOOLEAN NOT NULL,
    reason     TEXT NOT NULL,
    changed_at BIGINT NOT NULL
, previous BIGINT NOT NULL DEFAULT 0, previous_until BIGINT NOT NULL DEFAULT 0, refused TEXT NOT NULL DEFAULT '');
CREATE TABLE device_labels (
    key    TEXT COLLATE "binary" NOT NULL,
    value  TEXT COLLATE "binary" NOT NULL,
    device TEXT COLLATE "binary" NOT NULL,
    PRIMARY KEY (key, value, device)
);
CREATE TABLE "devices" (
    device              TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    admission           TEXT NOT NULL,
    client_id           TEXT NOT NULL,
    name                TEXT NOT NULL,
    name_folded         TEXT COLLATE "binary" NOT NULL,
    labels              TEXT NOT NULL,
    preferred_transport TEXT NOT NULL,
    joined              TEXT NOT NULL,
    revision            BIGINT NOT NULL,
    board               TEXT COLLATE "binary" NOT NULL,
    board_folded        TEXT COLLATE "binary" NOT NULL,
    firmware            TEXT COLLATE "binary" NOT NULL,
    firmware_key        TEXT COLLATE "binary" NOT NULL,
    elf_sha256          TEXT NOT NULL,
    chip                TEXT NOT NULL,
    language            TEXT NOT NULL,
    serial              TEXT NOT NULL,
    activate_v2         BOOLEAN NOT NULL,
    first_seen          BIGINT NOT NULL,
    checked_at          BIGINT NOT NULL,
    search              TEXT COLLATE "binary" GENERATED ALWAYS AS (device || '|' || name_folded || '|' || board_folded) STORED
);
CREATE TABLE fleet (
    key   TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
);
CREATE TABLE fleet_counts (
    dimension TEXT COLLATE "binary" NOT NULL,
    value     TEXT COLLATE "binary" NOT NULL,
    slot      BIGINT NOT NULL,
    n         BIGINT NOT NULL,
    PRIMARY KEY (dimension, value, slot)
);
CREATE TABLE fleet_revision (
    one     BIGINT NOT NULL PRIMARY KEY,
    n       BIGINT NOT NULL,
    lineage TEXT NOT NULL
);
CREATE TABLE goose_db_version (
		id INTEGER PRIMARY KEY AUTOINCREMENT,
		version_id INTEGER NOT NULL,
		is_applied INTEGER NOT NULL,
		tstamp TIMESTAMP DEFAULT (datetime('now'))
	);
CREATE TABLE job_confirmations (
    digest TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    owner  TEXT NOT NULL,
    hash   TEXT NOT NULL,
    rules  TEXT NOT NULL,
    until  BIGINT NOT NULL
);
CREATE TABLE jobs (
    job         TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    owner       TEXT COLLATE "binary" NOT NULL,
    owner_name  TEXT NOT NULL,
    idem        TEXT COLLATE "binary" NOT NULL,
    hash        TEXT NOT NULL,
    action      TEXT NOT NULL,
    spec        TEXT NOT NULL,
    confirmed   TEXT NOT NULL,
    devices     TEXT NOT NULL,
    created_at  BIGINT NOT NULL,
    state       TEXT NOT NULL,
    reason      TEXT NOT NULL,
    prior       TEXT NOT NULL,
    version     BIGINT NOT NULL,
    ready_at    BIGINT NOT NULL,
    stage       BIGINT NOT NULL,
    stage_end   BIGINT NOT NULL,
    opened      BIGINT NOT NULL,
    started     BIGINT NOT NULL,
    passed_ok   BIGINT NOT NULL,
    round       BIGINT NOT NULL,
    round_n     BIGINT NOT NULL,
    next_at     BIGINT NOT NULL,
    prepared_to TEXT NOT NULL,
    tat         BIGINT NOT NULL,
    missed      BIGINT NOT NULL,
    waiting     BIGINT NOT NULL,
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
    ended_at    BIGINT NOT NULL
, held BIGINT NOT NULL DEFAULT 0, reserved BIGINT NOT NULL DEFAULT 0);
CREATE TABLE nodes (
    node       TEXT COLLATE "binary" NOT NULL,
    instance   TEXT COLLATE "binary" NOT NULL,
    beat       BIGINT NOT NULL,
    started_at BIGINT NOT NULL,
    version    TEXT NOT NULL,
    api        TEXT NOT NULL,
    devices    BIGINT NOT NULL, stamps BOOLEAN NOT NULL DEFAULT FALSE, schema BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (node, instance)
);
CREATE TABLE photos (
    id       TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    device   TEXT COLLATE "binary" NOT NULL,
    question TEXT NOT NULL,
    bytes    BIGINT NOT NULL,
    sha256   TEXT NOT NULL,
    kind     TEXT NOT NULL,
    taken_at BIGINT NOT NULL
);
CREATE TABLE policies (
    version  BIGINT NOT NULL PRIMARY KEY,
    document TEXT NOT NULL,
    at       BIGINT NOT NULL,
    author   TEXT NOT NULL
);
CREATE TABLE presence (
    device          TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    epoch           BIGINT NOT NULL,
    seq             BIGINT NOT NULL,
    online          BOOLEAN NOT NULL,
    node            TEXT NOT NULL,
    session         TEXT NOT NULL,
    client_id       TEXT NOT NULL,
    transport       TEXT NOT NULL,
    reason          TEXT NOT NULL,
    connected_at    BIGINT NOT NULL,
    last_seen       BIGINT NOT NULL,
    mcp_state       TEXT NOT NULL,
    mcp_error       TEXT NOT NULL,
    catalog         TEXT NOT NULL,
    catalog_partial BOOLEAN NOT NULL,
    tool_count      BIGINT NOT NULL
, generation BIGINT NOT NULL DEFAULT 0, offline_since BIGINT NOT NULL DEFAULT 0);
CREATE TABLE tasks (
    job      TEXT COLLATE "binary" NOT NULL,
    device   TEXT COLLATE "binary" NOT NULL,
    round    BIGINT NOT NULL,
    seq      BIGINT NOT NULL,
    spread   BIGINT NOT NULL,
    state    TEXT NOT NULL,
    due_at   BIGINT NOT NULL,
    attempt  BIGINT NOT NULL,
    fence    BIGINT NOT NULL,
    instance TEXT COLLATE "binary" NOT NULL,
    node     TEXT NOT NULL,
    call_id  TEXT NOT NULL,
    outcome  TEXT NOT NULL,
    code     TEXT NOT NULL,
    detail   TEXT NOT NULL,
    result   TEXT NOT NULL,
    late     BOOLEAN NOT NULL,
    begun_at BIGINT NOT NULL,
    ended_at BIGINT NOT NULL,
    PRIMARY KEY (job, device, round)
);
CREATE TABLE webhook_offline (
    webhook TEXT COLLATE "binary" NOT NULL,
    device  TEXT COLLATE "binary" NOT NULL,
    since   BIGINT NOT NULL, ended BOOLEAN NOT NULL DEFAULT FALSE,
    PRIMARY KEY (webhook, device)
);
CREATE TABLE webhooks (
    id            TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    owner         TEXT NOT NULL,
    owner_name    TEXT NOT NULL,
    url           TEXT NOT NULL,
    types         TEXT NOT NULL,
    devices       TEXT NOT NULL,
    offline_for   BIGINT NOT NULL,
    sealed        TEXT NOT NULL,
    created_at    BIGINT NOT NULL,
    version       BIGINT NOT NULL,
    position      TEXT NOT NULL,
    gap           TEXT NOT NULL,
    delivered     BIGINT NOT NULL,
    delivered_at  BIGINT NOT NULL,
    failing_since BIGINT NOT NULL,
    last_error    TEXT NOT NULL,
    instance      TEXT NOT NULL,
    beat   BIGINT NOT NULL
, disabled_at BIGINT NOT NULL DEFAULT 0);
CREATE UNIQUE INDEX attestation_keys_device ON attestation_keys (device) WHERE device <> '';
CREATE INDEX audit_blocks_by_time ON audit_blocks (last_at, run, first_seq);
CREATE INDEX catalog_history_catalog ON catalog_history (catalog COLLATE "binary");
CREATE INDEX changes_device ON changes (device, revision);
CREATE INDEX devices_board ON devices (board, device);
CREATE INDEX devices_firmware ON devices (firmware, device);
CREATE INDEX devices_joined ON devices (first_seen) WHERE joined <> '';
CREATE INDEX devices_name ON devices (name_folded, device);
CREATE INDEX devices_revoked ON devices (device) WHERE admission <> 'member';
CREATE INDEX devices_search ON devices (device, search);
CREATE INDEX job_confirmations_owner ON job_confirmations (owner, until);
CREATE INDEX job_confirmations_until ON job_confirmations (until);
CREATE INDEX jobs_ended ON jobs (ended_at, job);
CREATE UNIQUE INDEX jobs_idem ON jobs (owner, idem) WHERE idem <> '';
CREATE INDEX jobs_owner ON jobs (owner, ended_at, job);
CREATE INDEX photos_by_device ON photos (device, id);
CREATE INDEX presence_catalog ON presence (catalog COLLATE "binary", device) WHERE catalog <> '';
CREATE INDEX presence_last_seen ON presence (last_seen, device) WHERE NOT online;
CREATE INDEX presence_node ON presence (node COLLATE "binary", device) WHERE online;
CREATE INDEX presence_offline ON presence (device) WHERE NOT online;
CREATE INDEX presence_offline_since ON presence (offline_since, device) WHERE NOT online;
CREATE INDEX presence_online ON presence (device) WHERE online;
CREATE INDEX presence_reason ON presence (reason COLLATE "binary", device) WHERE NOT online;
CREATE INDEX presence_transport ON presence (transport COLLATE "binary", device) WHERE online;
CREATE UNIQUE INDEX tasks_one ON tasks (device) WHERE state = 'running';
CREATE INDEX tasks_queue ON tasks (device, seq, job) WHERE state = 'waiting';
CREATE INDEX tasks_running ON tasks (instance) WHERE state = 'running';
CREATE INDEX tasks_spread ON tasks (job, spread) WHERE state = 'waiting';
INSERT INTO fleet VALUES ('lowest_schema', '23');
INSERT INTO fleet_counts VALUES ('state', 'revoked', 0, 0);
INSERT INTO fleet_revision VALUES (1, 0, '');
INSERT INTO goose_db_version (version_id, is_applied) VALUES (0, TRUE), (1, TRUE), (2, TRUE), (3, TRUE), (4, TRUE), (5, TRUE), (6, TRUE), (7, TRUE), (8, TRUE), (9, TRUE), (10, TRUE), (11, TRUE), (12, TRUE), (13, TRUE), (14, TRUE), (15, TRUE), (16, TRUE), (17, TRUE), (19, TRUE), (20, TRUE), (21, TRUE), (22, TRUE), (23, TRUE);
