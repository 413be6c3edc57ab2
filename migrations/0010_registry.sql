-- +goose Up

-- The revision of the fleet: the number of the last change. It is updated as the
-- last statement before COMMIT of every transaction that writes changes, so that
-- its lock makes the order of commits that of the revisions. lineage is random,
-- and another one after a restore.
CREATE TABLE fleet_revision (
    one     BIGINT NOT NULL PRIMARY KEY, -- 1: there is one row
    n       BIGINT NOT NULL,
    lineage TEXT NOT NULL                -- empty until the first node has set it
);
INSERT INTO fleet_revision (one, n, lineage) VALUES (1, 0, '');

-- The log of decisions, each of one aspect of one device, or of the fleet.
CREATE TABLE changes (
    revision BIGINT NOT NULL PRIMARY KEY,
    id       TEXT COLLATE "binary" NOT NULL, -- random; what is tried again has the same
    device   TEXT COLLATE "binary" NOT NULL, -- empty: of the fleet
    aspect   TEXT NOT NULL,
    value    TEXT NOT NULL,                  -- JSON
    who      TEXT NOT NULL,
    at       BIGINT NOT NULL                 -- microseconds
);
CREATE INDEX changes_device ON changes (device, revision);

-- Devices of the fleet. What is decided of them (admission to revision) is the
-- state folded from their changes, and written in the same transaction. What they
-- report at an OTA check (board to activate_v2) is written later, and an older
-- checked_at replaces nothing.
CREATE TABLE registry (
    device              TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    admission           TEXT NOT NULL,    -- member, revoked
    client_id           TEXT NOT NULL,    -- the admitted Client-Id; empty: the first that comes is admitted
    name                TEXT NOT NULL,
    name_folded         TEXT COLLATE "binary" NOT NULL, -- in lower case
    labels              TEXT NOT NULL,    -- JSON object, keys sorted, no spaces; device_labels has a row for each
    preferred_transport TEXT NOT NULL,    -- websocket, mqtt; empty: the node's default
    joined              TEXT NOT NULL,    -- the transport offered to a device that joined by itself; empty once somebody decided about it, or it connected
    revision            BIGINT NOT NULL,  -- of its last change
    board               TEXT COLLATE "binary" NOT NULL,
    board_folded        TEXT COLLATE "binary" NOT NULL, -- in lower case
    firmware            TEXT COLLATE "binary" NOT NULL, -- version
    firmware_key        TEXT COLLATE "binary" NOT NULL, -- sorts as the firmware compares versions; empty: it could not read this one
    elf_sha256          TEXT NOT NULL,    -- of the running image
    chip                TEXT NOT NULL,
    language            TEXT NOT NULL,
    serial              TEXT NOT NULL,
    activate_v2         BOOLEAN NOT NULL,
    first_seen          BIGINT NOT NULL,  -- microseconds
    checked_at          BIGINT NOT NULL,  -- last OTA check, microseconds
    search              TEXT COLLATE "binary" GENERATED ALWAYS AS (device || '|' || name_folded || '|' || board_folded) STORED
);
INSERT INTO registry (device, admission, client_id, name, name_folded, labels, preferred_transport, joined, revision,
    board, board_folded, firmware, firmware_key, elf_sha256, chip, language, serial, activate_v2, first_seen, checked_at)
SELECT device, CASE WHEN EXISTS (SELECT 1 FROM credential_exceptions x WHERE x.device = d.device AND x.revoked) THEN 'revoked' ELSE admission END,
    client_id, name, name_folded, labels, preferred_transport, '', 0,
    board, lower(board), firmware, '', elf_sha256, chip, language, serial, activate_v2, first_seen, checked_at
FROM devices d WHERE admission <> 'pending' OR EXISTS (SELECT 1 FROM credential_exceptions x WHERE x.device = d.device AND x.revoked);
DROP TABLE devices;
ALTER TABLE registry RENAME TO devices;

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

-- Every device has a row here from its beginning: a page of those that are
-- offline is otherwise no range of any index.
DELETE FROM presence WHERE NOT EXISTS (SELECT 1 FROM devices d WHERE d.device = presence.device);
INSERT INTO presence (device, epoch, seq, online, node, session, client_id, transport, reason, connected_at, last_seen,
    mcp_state, mcp_error, catalog, catalog_partial, tool_count, generation)
SELECT device, 0, 0, FALSE, '', '', '', '', 'never_connected', 0, CASE WHEN checked_at > first_seen THEN checked_at ELSE first_seen END,
    'unknown', '', '', FALSE, 0, 0
FROM devices d WHERE NOT EXISTS (SELECT 1 FROM presence p WHERE p.device = d.device);
ALTER TABLE presence ADD COLUMN offline_since BIGINT NOT NULL DEFAULT 0; -- microseconds; 0: it is online, or never was
UPDATE presence SET offline_since = last_seen WHERE NOT online AND epoch > 0;

CREATE INDEX presence_online ON presence (device) WHERE online;
CREATE INDEX presence_offline ON presence (device) WHERE NOT online;
CREATE INDEX presence_node ON presence (node COLLATE "binary", device) WHERE online;
CREATE INDEX presence_transport ON presence (transport COLLATE "binary", device) WHERE online;
CREATE INDEX presence_reason ON presence (reason COLLATE "binary", device) WHERE NOT online;
CREATE INDEX presence_last_seen ON presence (last_seen, device) WHERE NOT online;
CREATE INDEX presence_offline_since ON presence (offline_since, device) WHERE NOT online;
CREATE INDEX presence_catalog ON presence (catalog COLLATE "binary", device) WHERE catalog <> '';

-- How many devices have which value, kept in the transactions that change it. The
-- number is the sum over the slots, which keep nodes out of each other's way.
CREATE TABLE fleet_counts (
    dimension TEXT COLLATE "binary" NOT NULL, -- state, offline_reason, transport, board, firmware, node, mcp_state, catalog
    value     TEXT COLLATE "binary" NOT NULL,
    slot      BIGINT NOT NULL,
    n         BIGINT NOT NULL,                -- below zero where another slot counted the device
    PRIMARY KEY (dimension, value, slot)
);
INSERT INTO fleet_counts SELECT 'board', board, 0, count(*) FROM devices GROUP BY board;
INSERT INTO fleet_counts SELECT 'firmware', firmware, 0, count(*) FROM devices GROUP BY firmware;
INSERT INTO fleet_counts SELECT 'state', 'revoked', 0, count(*) FROM devices WHERE admission <> 'member';
INSERT INTO fleet_counts SELECT 'state', CASE WHEN online THEN 'online' ELSE 'offline' END, 0, count(*) FROM presence GROUP BY online;
INSERT INTO fleet_counts SELECT 'offline_reason', reason, 0, count(*) FROM presence WHERE NOT online GROUP BY reason;
INSERT INTO fleet_counts SELECT 'transport', transport, 0, count(*) FROM presence WHERE online GROUP BY transport;
INSERT INTO fleet_counts SELECT 'node', node, 0, count(*) FROM presence WHERE online GROUP BY node;
INSERT INTO fleet_counts SELECT 'mcp_state', mcp_state, 0, count(*) FROM presence GROUP BY mcp_state;
INSERT INTO fleet_counts SELECT 'catalog', catalog, 0, count(*) FROM presence WHERE catalog <> '' GROUP BY catalog;

-- Exceptions of devices that are known mirror what is decided of them; a row
-- without a device is that of one which was forgotten.
INSERT INTO credential_exceptions (device, generation, revoked, reason, changed_at, previous, previous_until)
SELECT device, 0, TRUE, 'revoked', 0, 0, 0 FROM devices d
WHERE admission = 'revoked' AND NOT EXISTS (SELECT 1 FROM credential_exceptions x WHERE x.device = d.device);

-- The schema of a node: no two versions run side by side across this file.
ALTER TABLE nodes ADD COLUMN schema BIGINT NOT NULL DEFAULT 0;
