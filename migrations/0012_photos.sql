-- +goose Up

-- The index of the photos in the object store, which has the pictures and is the
-- truth: a row may be missing or too many for a while. Ids sort by time.
CREATE TABLE photos (
    id       TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    device   TEXT COLLATE "binary" NOT NULL,
    question TEXT NOT NULL,
    bytes    BIGINT NOT NULL,
    sha256   TEXT NOT NULL,
    kind     TEXT NOT NULL,
    taken_at BIGINT NOT NULL -- microseconds
);
CREATE INDEX photos_by_device ON photos (device, id);
