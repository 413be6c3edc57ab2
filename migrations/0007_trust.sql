-- +goose Up

-- Keys that the operator has burnt into chips: a signature with one
-- proves that chip. A serial number proves one device at most, and a device is
-- proven by one serial number at most.
CREATE TABLE attestation_keys (
    serial      TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    device      TEXT COLLATE "binary" NOT NULL, -- empty until the first proof, unless imported
    sealed      TEXT NOT NULL,                  -- the key, encrypted with one that derives from the fleet's secret
    imported_at BIGINT NOT NULL,                -- microseconds
    bound_at    BIGINT NOT NULL                 -- microseconds; 0: not bound
);
CREATE UNIQUE INDEX attestation_keys_device ON attestation_keys (device) WHERE device <> '';

-- Rotation: the generation before stays valid until this time, or until the
-- device has come with the new one.
ALTER TABLE credential_exceptions ADD COLUMN previous BIGINT NOT NULL DEFAULT 0;
ALTER TABLE credential_exceptions ADD COLUMN previous_until BIGINT NOT NULL DEFAULT 0; -- microseconds; 0: none is

-- The generation of the credentials that a connection came with.
ALTER TABLE presence ADD COLUMN generation BIGINT NOT NULL DEFAULT 0;
