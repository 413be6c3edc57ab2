-- +goose Up

-- The return of a device is delivered if its absence was. True: it was delivered, or the absence was left out.
ALTER TABLE webhook_offline ADD COLUMN ended BOOLEAN NOT NULL DEFAULT FALSE;
