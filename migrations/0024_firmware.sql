-- +goose Up
-- +goose StatementBegin

-- Firmware images. Their bytes are in the object store, by the SHA-256.
CREATE TABLE firmware (
    sha256     TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    elf_sha256 TEXT COLLATE "binary" NOT NULL,  -- by which devices name what they run
    size       BIGINT NOT NULL,                 -- bytes
    document   TEXT NOT NULL,                   -- JSON: what was read of it, an espimage.Image
    note       TEXT NOT NULL,
    boards     TEXT NOT NULL,                   -- JSON array of boards that somebody set; empty: those of the document
    added_by   TEXT NOT NULL,                   -- name of the key
    added_at   BIGINT NOT NULL                  -- microseconds
);

-- The images that devices had, in the order in which nodes wrote the checks that showed them. The newest of a device is what it ran at
-- its last check.
CREATE TABLE device_images (
    device     TEXT COLLATE "binary" NOT NULL,
    seq        BIGINT NOT NULL,                 -- from 1
    elf_sha256 TEXT COLLATE "binary" NOT NULL,
    version    TEXT NOT NULL,
    board      TEXT NOT NULL,
    details    TEXT NOT NULL,                   -- JSON: devices.Details of the last check with this image; empty: a check before this table
    cause      TEXT NOT NULL,                   -- of the change to it; empty: it is the first that is known
    at         BIGINT NOT NULL,                 -- of the first check with it, microseconds
    PRIMARY KEY (device, seq)
);
CREATE INDEX device_images_elf ON device_images (elf_sha256);
INSERT INTO device_images (device, seq, elf_sha256, version, board, details, cause, at)
SELECT device, 1, elf_sha256, firmware, board, '', '', checked_at FROM devices WHERE elf_sha256 <> '';

ALTER TABLE devices ADD COLUMN image_hash TEXT NOT NULL DEFAULT '';    -- of the ELF and the details of the newest row of device_images, so that a check which says the same writes nothing
ALTER TABLE devices ADD COLUMN image_checks BIGINT NOT NULL DEFAULT 0; -- that showed the image; 2: two or more
-- +goose StatementEnd
