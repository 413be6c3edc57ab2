package backup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/datadir"
	"fleetd/internal/durable"
	"fleetd/internal/store"
	"fleetd/internal/store/database"
)

// Halted is what became of the open jobs.
type Halted = database.Halted

// RestoreReport is the result of Restore.
type RestoreReport struct {
	Created time.Time // when the backup was made
	Version string    // of the program that made it
	Node    string    // that ran then, if one did
	Files   int
	Halted  Halted // of the jobs in the database
	// Without are sentences: what the node needs and the backup did not hold.
	Without []string
}

// Restore writes the files of a backup into a data directory, which it makes
// if need be. The directory must be empty unless force is given; then the
// files of the backup take the place of those that are there, and the others
// stay. A node that runs on it is never touched: the directory is locked
// meanwhile. The whole backup is checked before the first byte is written. Its
// open jobs are halted; with keepSchedules, which wants the former node to be
// stopped since the backup, schedules go on. An error is one sentence.
func Restore(archive, dir string, force, keepSchedules bool) (report RestoreReport, err error) {
	m, err := readArchive(archive, nil)
	if err != nil {
		return report, err
	}
	report = RestoreReport{Created: m.Created, Version: m.Version, Node: m.Node, Files: len(m.Files)}
	if !force {
		if err := isEmpty(dir); err != nil {
			return report, err
		}
	}
	locked, err := datadir.Open(dir)
	if err != nil {
		return report, err
	}
	defer locked.Close()
	temp, err := os.MkdirTemp(dir, "restore.*") // mode 0700
	if err != nil {
		return report, fmt.Errorf("--data-dir: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(temp)) }()
	if _, err := readArchive(archive, func(f archivedFile, mode fs.FileMode, content io.Reader) error {
		name := filepath.Join(temp, filepath.FromSlash(f.Name))
		if err := durable.MkdirAll(filepath.Dir(name)); err != nil {
			return err
		}
		return durable.Create(name, mode&0o700, content) // readable for the owner alone, whatever the archive says
	}); err != nil {
		return report, err
	}
	has := func(name string) bool {
		return slices.ContainsFunc(m.Files, func(f archivedFile) bool { return f.Name == name })
	}
	if !has(datadir.FileSecret) {
		report.Without = append(report.Without, "The backup holds no secret: start the node with the --secret or --secret-file that it had.")
	}
	if !has(store.FileName) {
		report.Without = append(report.Without, "The backup holds no database: restore that of Postgres with pg_restore, and start the node with its --database.")
	}
	if has(store.FileName) {
		file := filepath.Join(temp, store.FileName)
		if err := database.EndLineage(context.Background(), file, keepSchedules); err != nil {
			return report, err
		}
		if report.Halted, err = database.HaltJobs(context.Background(), file, keepSchedules, clock.Now()); err != nil {
			return report, err
		}
	}
	return report, moveIn(temp, dir)
}

// isEmpty refuses a directory in which something is.
func isEmpty(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("--data-dir: %w", err)
	}
	for _, e := range entries {
		if e.Name() != datadir.LockFile && e.Name() != "lost+found" { // of an ended node; of a fresh file system
			return fmt.Errorf("--data-dir: %s is not empty; give an empty directory, or --force to replace what the backup holds", dir)
		}
	}
	return nil
}

// moveIn puts what was unpacked in its place. What belongs to the old files
// goes first: the log of another database would be applied to the new one.
func moveIn(temp, dir string) error {
	if err := datadir.RemoveRunInfo(dir); err != nil {
		return err
	}
	entries, err := os.ReadDir(temp)
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		old := []string{name}
		if e.Name() == store.FileName {
			old = []string{name + "-wal", name + "-shm", name + "-journal"}
		}
		for _, o := range old {
			if err := os.RemoveAll(o); err != nil {
				return err
			}
		}
		if err := durable.Rename(filepath.Join(temp, e.Name()), name); err != nil {
			return err
		}
	}
	return nil
}
