-- +goose Up

-- Devices of the fleet: who they are, what they said of themselves at their
-- last OTA check, and what operators wrote on them. Written by fleetd only:
-- a row changed here is overwritten by the next save of a running node.
CREATE TABLE devices (
    device              TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    client_id           TEXT NOT NULL,    -- the admitted Client-Id
    pending_client_id   TEXT NOT NULL,    -- another one that waits for approval
    admission           TEXT NOT NULL,    -- member, pending, revoked
    name                TEXT NOT NULL,
    name_folded         TEXT NOT NULL,    -- name in lower case, for searching
    labels              TEXT NOT NULL,    -- JSON object, keys sorted, no spaces
    preferred_transport TEXT NOT NULL,    -- websocket, mqtt; empty: the node's default
    board               TEXT NOT NULL,
    firmware            TEXT NOT NULL,    -- version
    elf_sha256          TEXT NOT NULL,    -- of the running image
    chip                TEXT NOT NULL,
    language            TEXT NOT NULL,
    serial              TEXT NOT NULL,
    activate_v2         BOOLEAN NOT NULL,
    first_seen          BIGINT NOT NULL,  -- microseconds
    checked_at          BIGINT NOT NULL   -- last OTA check, microseconds
);

-- The newest known connection of each device. A pair (epoch, seq) that is not
-- above the stored one changes nothing.
CREATE TABLE presence (
    device          TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    epoch           BIGINT NOT NULL,
    seq             BIGINT NOT NULL,
    online          BOOLEAN NOT NULL,
    node            TEXT NOT NULL,
    session         TEXT NOT NULL,
    client_id       TEXT NOT NULL,
    transport       TEXT NOT NULL,
    reason          TEXT NOT NULL,        -- why the last session ended
    connected_at    BIGINT NOT NULL,      -- microseconds
    last_seen       BIGINT NOT NULL,      -- microseconds
    mcp_state       TEXT NOT NULL,
    mcp_error       TEXT NOT NULL,
    catalog         TEXT NOT NULL,        -- catalogs.sha256; empty if unknown
    catalog_partial BOOLEAN NOT NULL,
    tool_count      BIGINT NOT NULL
);

-- Tool lists, each stored once however many devices have it.
CREATE TABLE catalogs (
    sha256     TEXT COLLATE "binary" NOT NULL PRIMARY KEY, -- of the list's bytes
    tools      TEXT NOT NULL,             -- JSON array exactly as the device sent it
    encoding   TEXT NOT NULL,             -- text; base64 if the bytes are not valid text
    tool_count BIGINT NOT NULL,
    bytes      BIGINT NOT NULL,
    first_seen BIGINT NOT NULL            -- microseconds
);

-- Which device had which catalog under which firmware, from when on.
CREATE TABLE catalog_history (
    device     TEXT COLLATE "binary" NOT NULL,
    epoch      BIGINT NOT NULL,
    seq        BIGINT NOT NULL,
    catalog    TEXT NOT NULL,             -- catalogs.sha256
    firmware   TEXT NOT NULL,
    elf_sha256 TEXT NOT NULL,
    partial    BOOLEAN NOT NULL,          -- the list could not be read to its end
    at         BIGINT NOT NULL,           -- microseconds
    PRIMARY KEY (device, epoch, seq)
);

-- Devices whose credentials are not those of generation 0: rotated, revoked or
-- forgotten. A row stays when its device is forgotten.
CREATE TABLE credential_exceptions (
    device     TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    generation BIGINT NOT NULL,
    revoked    BOOLEAN NOT NULL,
    reason     TEXT NOT NULL,
    changed_at BIGINT NOT NULL            -- microseconds
);

-- Facts that all nodes of the fleet must share.
CREATE TABLE fleet (
    key   TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
);
