-- +goose Up

-- The lowest schema version that a program must know to use the database: Lowest in migrations.go. A migration after which older
-- programs cannot use the database any longer raises both.
INSERT INTO fleet (key, value) VALUES ('lowest_schema', '23');
