package backup

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/config"
	"fleetd/internal/credential"
	"fleetd/internal/datadir"
	"fleetd/internal/devices/registry"
	"fleetd/internal/durable"
	"fleetd/internal/store"
	"fleetd/internal/store/database"
)

// BackupReport is the result of Backup.
type BackupReport struct {
	Path    string   // of the archive
	Size    int64    // bytes
	Node    string   // name of the node, if it runs
	Schema  int64    // of the database in it; 0 without one
	Files   int      // in the archive
	Without []string // sentences: what is not in it, and how to keep that
}

// Backup writes everything that the node of cfg.DataDir needs to start
// elsewhere into one archive, whether it runs or not, and without its lock:
// the SQLite database as it is at one moment, the secret, the token, the ports
// and the note of members. output is a file, replaced in one step, or a
// directory, where the archive gets a name with the time. streams adds events
// and photos of the embedded NATS, which must not change meanwhile: the node
// must not run. The archive has mode 0600, since it holds the secret. An error
// is one sentence, and no file remains.
func Backup(ctx context.Context, cfg *config.Config, output string, streams bool) (report BackupReport, err error) {
	now := clock.Now()
	if strings.HasSuffix(output, string(filepath.Separator)) { // a directory is meant, whether it is there or not
		if err := durable.MkdirAll(output); err != nil {
			return report, fmt.Errorf("--output: %w", err)
		}
	}
	if info, err := os.Stat(output); err == nil && info.IsDir() {
		output = filepath.Join(output, "fleetd-backup-"+now.Format("20060102T150405Z")+".tar.gz")
	}
	if info, err := os.Stat(cfg.DataDir); err != nil || !info.IsDir() {
		return report, fmt.Errorf("--data-dir: %s is not the data directory of a node", cfg.DataDir)
	}
	temp, err := os.MkdirTemp(filepath.Dir(output), ".fleetd-backup-*") // mode 0700, and on the same file system
	if err != nil {
		return report, fmt.Errorf("-o: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(temp)) }()

	b := &backup{cfg: cfg, dir: &datadir.Dir{Path: cfg.DataDir}, temp: temp}
	report.Path = output
	if streams {
		locked, err := datadir.Open(cfg.DataDir)
		if err != nil {
			return report, fmt.Errorf("events and photos cannot be copied while the node runs: %w", err)
		}
		defer locked.Close()
	} else if err := b.findNode(); err != nil {
		return report, err
	}
	report.Node = b.node
	// The small files first: a note of members that is older than the database
	// only lacks what the database has.
	for _, name := range []string{datadir.FileSecret, datadir.FileToken, datadir.FilePorts, registry.RevocationsFile, datadir.FileAudit} {
		if err := b.add(name, b.dir.File(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return report, err
		}
	}
	if err := b.addDatabase(ctx); err != nil {
		return report, err
	}
	if err := b.addStreams(streams); err != nil {
		return report, err
	}
	m := manifest{Kind: archiveKind, Format: archiveFormat, Version: cfg.Version, Created: now, Node: report.Node, Schema: b.schema}
	for _, f := range b.files {
		m.Files = append(m.Files, f.archivedFile)
	}
	report.Schema, report.Files, report.Without = b.schema, len(b.files), b.without
	packed := filepath.Join(temp, "archive")
	if report.Size, err = b.pack(ctx, packed, m); err != nil {
		return report, err
	}
	if err := durable.Rename(packed, output); err != nil {
		return report, fmt.Errorf("-o: %w", err)
	}
	return report, nil
}

// backup is one run of Backup.
type backup struct {
	cfg     *config.Config
	dir     *datadir.Dir
	temp    string // a directory of our own
	node    string // the running one, if there is one
	running string // place of its database, if known
	files   []sourceFile
	schema  int64
	without []string
}

// sourceFile is a file on its way into the archive.
type sourceFile struct {
	archivedFile
	from string
	mode fs.FileMode
}

// add takes a file that does not change any more, or is only ever replaced as
// a whole.
func (b *backup) add(name, from string) error {
	file, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }() // only read
	info, err := file.Stat()
	if err != nil {
		return err
	}
	kept := filepath.Join(b.temp, fmt.Sprint(len(b.files)))
	if strings.HasPrefix(name, datadir.DirNATS+"/") || name == store.FileName {
		kept = from
	}
	sum := sha256.New()
	size, err := io.Copy(sum, file)
	if err == nil && kept != from { // it may be replaced before it is packed
		if _, err = file.Seek(0, io.SeekStart); err == nil {
			err = durable.Create(kept, 0o600, file)
		}
	}
	if err != nil {
		return fmt.Errorf("copy %s: %w", from, err)
	}
	b.files = append(b.files, sourceFile{archivedFile{name, size, hex.EncodeToString(sum.Sum(nil))}, kept, info.Mode().Perm()})
	return nil
}

// addDatabase copies the SQLite database, or reports how to copy Postgres.
func (b *backup) addDatabase(ctx context.Context) error {
	place, err := database.Location(b.cfg.Database, b.cfg.DataDir)
	if err != nil {
		return fmt.Errorf("--database: %w", err)
	}
	if b.running != "" && b.running != place {
		path, lite := database.SQLitePath(b.running)
		_, missing := os.Stat(path) // a container may know it by another name
		switch {
		case b.cfg.Given("database") && !(lite && missing != nil):
			return fmt.Errorf("--database: the running node uses %s, not %s; give what the node was given", b.running, place)
		case !lite:
			return fmt.Errorf("the running node uses %s; give --database as the node has it, so that this can say how to back it up", b.running)
		case missing == nil:
			place = b.running
		}
	}
	path, lite := database.SQLitePath(place)
	if !lite {
		command, err := database.DumpCommand(b.cfg.Database, "fleetd.dump")
		if err != nil {
			return fmt.Errorf("--database: %w", err)
		}
		b.without = append(b.without, "The database is not in it; back it up with: "+command)
		return b.secretOf("")
	}
	copied := filepath.Join(b.temp, store.FileName)
	found, err := database.CopySQLite(ctx, path, copied)
	if errors.Is(err, fs.ErrNotExist) && !b.cfg.Given("database") {
		return fmt.Errorf("%s holds no %s; give --database as the node has it, or another --data-dir", b.cfg.DataDir, store.FileName)
	}
	if err != nil {
		return err
	}
	if err := b.add(store.FileName, copied); err != nil {
		return err
	}
	b.schema = found.Schema
	return b.secretOf(found.Fingerprint)
}

// findNode looks for the node that uses the data directory, if one does.
func (b *backup) findNode() error {
	running, err := datadir.Running(b.dir.Path)
	if err != nil {
		return fmt.Errorf("--data-dir: cannot report whether its node runs: %w", err)
	}
	if info, err := datadir.ReadRunInfo(b.dir.Path); err == nil && running {
		b.node, b.running = info.Node, info.Database
	}
	return nil
}

// secretOf takes the secret of the directory out again if it is not the one
// that the database belongs to: the node was then given another.
func (b *backup) secretOf(fingerprint string) error {
	for i, f := range b.files {
		if f.Name != datadir.FileSecret {
			continue
		}
		secret, err := os.ReadFile(f.from)
		if err != nil {
			return err
		}
		mint, err := credential.New([]byte(strings.TrimSpace(string(secret))))
		if b.cfg.Secret == "" && err == nil && (fingerprint == "" || mint.Fingerprint() == fingerprint) {
			return nil
		}
		b.files = append(b.files[:i:i], b.files[i+1:]...)
		break
	}
	b.without = append(b.without, "The secret is not in it, since the node has it from --secret or --secret-file; without that very secret the backup is of no use.")
	return nil
}

// addStreams takes the files of the embedded NATS; the directory is locked.
func (b *backup) addStreams(streams bool) error {
	root := b.dir.File(datadir.DirNATS)
	if _, err := os.Stat(root); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if !streams {
		b.without = append(b.without, "Events and photos (nats/) are not in it; to have them too, stop the node and add --streams.")
		return nil
	}
	return filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		name, err := filepath.Rel(b.cfg.DataDir, path)
		if err != nil {
			return err
		}
		return b.add(filepath.ToSlash(name), path)
	})
}

// pack writes the archive and returns its size.
func (b *backup) pack(ctx context.Context, name string, m manifest) (size int64, err error) {
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return 0, fmt.Errorf("encode the manifest: %w", err)
	}
	reader, writer := io.Pipe()
	go func() {
		packed := gzip.NewWriter(writer)
		archive := tar.NewWriter(packed)
		err := b.packFiles(ctx, archive, append(text, '\n'), m.Created)
		writer.CloseWithError(errors.Join(err, archive.Close(), packed.Close())) // io.EOF to the reader if nil
	}()
	err = durable.Create(name, 0o600, reader)
	_ = reader.Close() // ends the writer if the disk is full
	if err != nil {
		return 0, fmt.Errorf("write the backup: %w", err)
	}
	info, err := os.Stat(name)
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

func (b *backup) packFiles(ctx context.Context, archive *tar.Writer, manifest []byte, now time.Time) error {
	if err := archive.WriteHeader(&tar.Header{Name: fileManifest, Mode: 0o600, Size: int64(len(manifest)), ModTime: now}); err != nil {
		return err
	}
	if _, err := archive.Write(manifest); err != nil {
		return err
	}
	for _, f := range b.files {
		if err := ctx.Err(); err != nil {
			return err
		}
		file, err := os.Open(f.from)
		if err != nil {
			return err
		}
		err = archive.WriteHeader(&tar.Header{Name: f.Name, Mode: int64(f.mode), Size: f.Size, ModTime: now})
		if err == nil {
			_, err = io.CopyN(archive, file, f.Size)
		}
		if err = errors.Join(err, file.Close()); err != nil {
			return fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	return nil
}
