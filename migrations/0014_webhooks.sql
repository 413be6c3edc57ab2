-- +goose Up

-- Webhooks: events of the fleet that are delivered to an address. Columns up to
-- version are what people set; the others are written by the node that delivers.
CREATE TABLE webhooks (
    id            TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    owner         TEXT NOT NULL,   -- id of the creator's key
    owner_name    TEXT NOT NULL,
    url           TEXT NOT NULL,
    types         TEXT NOT NULL,   -- JSON array
    devices       TEXT NOT NULL,   -- a selection; empty: all
    offline_for   BIGINT NOT NULL, -- microseconds; 0: offline is delivered at once
    sealed        TEXT NOT NULL,   -- the secret
    created_at    BIGINT NOT NULL, -- microseconds
    version       BIGINT NOT NULL, -- raised by every change of the above
    position      TEXT NOT NULL,   -- of the last event that was delivered or left out; empty: none
    gap           TEXT NOT NULL,   -- JSON array of what was deleted before it was delivered; empty: nothing
    delivered     BIGINT NOT NULL, -- deliveries
    delivered_at  BIGINT NOT NULL, -- of the last one
    failing_since BIGINT NOT NULL, -- 0: the last attempt was successful
    last_error    TEXT NOT NULL,
    instance      TEXT NOT NULL,   -- of the process that delivers
    lease_until   BIGINT NOT NULL  -- microseconds by the clock of the database
);

-- Devices whose absence was reported to a webhook with offline_for.
CREATE TABLE webhook_offline (
    webhook TEXT COLLATE "binary" NOT NULL,
    device  TEXT COLLATE "binary" NOT NULL,
    since   BIGINT NOT NULL, -- presence.offline_since
    PRIMARY KEY (webhook, device)
);
