package backup

import (
	"archive/tar"
	"compress/flate"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"fleetd/internal/datadir"
	"fleetd/internal/devices/registry"
	"fleetd/internal/store"
	"fleetd/internal/store/database"
)

// A backup is a tar file, compressed with gzip, whose first entry is the
// manifest. archiveFormat counts its changes; older programs refuse newer ones.
const (
	archiveKind   = "fleetd backup"
	archiveFormat = 1
	fileManifest  = "manifest.json"
	maxManifest   = 64 << 20 // bytes; that many names are in no data directory
	gzipMagic     = "\x1f\x8b"
)

// manifest lists what a backup contains.
type manifest struct {
	Kind    string         `json:"kind"`   // archiveKind
	Format  int            `json:"format"` // archiveFormat of the program that wrote it
	Version string         `json:"version"`
	Created time.Time      `json:"created"`
	Node    string         `json:"node,omitempty"` // if it ran
	Schema  int64          `json:"schema"`         // of the database in it; 0 without one
	Files   []archivedFile `json:"files"`
}

// archivedFile is one file of a backup.
type archivedFile struct {
	Name   string `json:"name"` // relative to the data directory, with slashes
	Size   int64  `json:"size"` // bytes
	SHA256 string `json:"sha256"`
}

// archivable reports whether a backup may hold a file of this name: what a node
// keeps, and nothing that could lie elsewhere.
func archivable(name string) bool {
	switch name {
	case datadir.FileSecret, datadir.FileToken, datadir.FilePorts, registry.RevocationsFile, datadir.FileAudit, store.FileName:
		return true
	}
	return strings.HasPrefix(name, datadir.DirNATS+"/") && path.Clean(name) == name && filepath.IsLocal(name) && !strings.ContainsAny(name, "\\\x00")
}

// readArchive checks a whole backup and calls use for each file in it, with
// its bytes; use may be nil. An error is one sentence. Whether the checksums
// are right is known only at the end: what use has written until then counts
// for nothing if there is an error.
func readArchive(name string, use func(f archivedFile, mode fs.FileMode, content io.Reader) error) (manifest, error) {
	var m manifest
	file, err := os.Open(name)
	if err != nil {
		return m, err
	}
	defer func() { _ = file.Close() }() // only read
	start := make([]byte, len(gzipMagic))
	n, _ := file.ReadAt(start, 0) // an error shows below
	unpacked, err := gzip.NewReader(file)
	if !strings.HasPrefix(gzipMagic, string(start[:n])) {
		return m, notBackup(name, nil) // too short to tell, gzip would call it cut off
	}
	if err != nil {
		return m, notBackup(name, err)
	}
	archive := tar.NewReader(unpacked)
	if m, err = readManifest(archive); err != nil {
		return m, notBackup(name, err)
	}
	switch {
	case m.Kind != archiveKind:
		return m, notBackup(name, nil)
	case m.Format > archiveFormat:
		return m, fmt.Errorf("%s was made by fleetd %q in a newer format (%d; this fleetd supports up to %d); restore it with that version", name, m.Version, m.Format, archiveFormat)
	case m.Schema > database.SchemaVersion():
		return m, fmt.Errorf("%s was made by fleetd %q and holds a database of schema version %d; this fleetd supports up to %d; restore it with that version", name, m.Version, m.Schema, database.SchemaVersion())
	case m.Schema > 0:
		if err := database.CheckMigratable(m.Schema); err != nil {
			return m, fmt.Errorf("%s was made by fleetd %q and holds a database: %w", name, m.Version, err)
		}
	}
	missing := map[string]archivedFile{}
	for _, f := range m.Files {
		if _, twice := missing[f.Name]; twice || !archivable(f.Name) {
			return m, fmt.Errorf("%s names the file %q, which no backup of fleetd holds; it is not restored", name, f.Name)
		}
		missing[f.Name] = f
	}
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return m, damaged(name, err)
		}
		f, listed := missing[header.Name]
		if !listed || header.Typeflag != tar.TypeReg || header.Size != f.Size {
			return m, fmt.Errorf("%s holds %q, which differs from its manifest; it is not restored", name, header.Name)
		}
		delete(missing, header.Name)
		sum := sha256.New()
		content := io.TeeReader(archive, sum)
		if use != nil {
			if err := use(f, header.FileInfo().Mode().Perm(), content); err != nil {
				return m, damaged(name, err)
			}
		}
		if _, err := io.Copy(io.Discard, content); err != nil {
			return m, damaged(name, err)
		}
		if hex.EncodeToString(sum.Sum(nil)) != f.SHA256 {
			return m, fmt.Errorf("%s is damaged: the checksum of %s is wrong; use another backup", name, f.Name)
		}
	}
	if _, err := io.Copy(io.Discard, unpacked); err != nil { // the checksum of gzip is at the end
		return m, damaged(name, err)
	}
	for missed := range missing {
		return m, fmt.Errorf("%s is damaged: %s is missing; use another backup", name, missed)
	}
	return m, nil
}

func readManifest(archive *tar.Reader) (m manifest, err error) {
	header, err := archive.Next()
	if err != nil {
		return m, err
	}
	if header.Name != fileManifest || header.Size > maxManifest {
		return m, errors.New("its first entry is not a manifest")
	}
	return m, json.NewDecoder(io.LimitReader(archive, maxManifest)).Decode(&m)
}

// notBackup is the error for another file, unless the file merely ends too early.
func notBackup(name string, err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return damaged(name, err)
	}
	return fmt.Errorf("%s is not a backup made by `fleetd backup`", name)
}

// damaged explains what is wrong with the bytes of a backup; other errors, such as
// a full disk, stay what they are.
func damaged(name string, err error) error {
	var corrupt flate.CorruptInputError
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%s is cut off; copy it again, or use another backup", name)
	case errors.Is(err, gzip.ErrChecksum), errors.Is(err, tar.ErrHeader), errors.As(err, &corrupt):
		return fmt.Errorf("%s is damaged (%w); use another backup", name, err)
	}
	return err
}
