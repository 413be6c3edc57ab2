package backup

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"fleetd/internal/config"
	"fleetd/internal/credential"
	"fleetd/internal/datadir"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
	"fleetd/internal/store"
	"fleetd/internal/store/database"
	"fleetd/internal/store/storetest"
)

// used makes a data directory as a node leaves it, with one device and, in the
// database's log alone, another: as after a kill.
func used(t *testing.T) (dir string, cfg *config.Config) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "data")
	d := open(t, dir)
	secret, err := d.Secret("")
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{datadir.FileToken: "token\n", datadir.FilePorts: `{"api-listen":"127.0.0.1:1"}`, registry.RevocationsFile: "[]", "nats/stream/1.blk": "block", "run.json.x": "left over"} {
		if err := os.MkdirAll(filepath.Dir(d.File(name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(d.File(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s, err := store.Open(t.Context(), "sqlite", dir, quiet)
	if err != nil {
		t.Fatal(err)
	}
	mint, err := credential.New([]byte(secret))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Fingerprint(t.Context(), mint.Fingerprint()); err != nil {
		t.Fatal(err)
	}
	storetest.AddMember(t, s, devices.Device{ID: "aa:bb:cc:dd:ee:ff", Name: "lamp"})
	t.Cleanup(func() { _ = s.Close(t.Context()) })
	d.Close()
	return dir, load(t, map[string]string{"data-dir": dir})
}

// tree is every file below a directory with its mode and content.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		if err != nil || info.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		name, _ := filepath.Rel(dir, path)
		files[name] = fmt.Sprintf("%v %s", info.Mode(), content)
		return err
	})
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return files
}

func TestBackupAndRestore(t *testing.T) {
	dir, cfg := used(t)
	cfg.Version = "v1"
	out := t.TempDir()
	report, err := Backup(t.Context(), cfg, out, true)
	if err != nil {
		t.Fatal(err)
	}
	if report.Schema != database.SchemaVersion() || report.Files != 6 || len(report.Without) != 0 || filepath.Dir(report.Path) != out || report.Node != "" {
		t.Errorf("%+v", report)
	}
	if left := tree(t, out); len(left) != 1 || !strings.HasPrefix(left[filepath.Base(report.Path)], "-rw------- ") {
		t.Errorf("%d files with modes unlike 0600 in the output directory", len(left))
	}
	made := filepath.Join(out, "new", "dir") + "/"
	if report, err := Backup(t.Context(), cfg, made, false); err != nil || filepath.Dir(report.Path)+"/" != made || len(tree(t, made)) != 1 {
		t.Errorf("into a directory that is to be made: %+v, %v", report, err)
	}
	to := filepath.Join(t.TempDir(), "new", "data")
	restored, err := Restore(report.Path, to, false, false)
	if err != nil || restored.Version != "v1" || len(restored.Without) != 0 || restored.Files != 6 {
		t.Fatalf("%+v, %v", restored, err)
	}
	before, after := tree(t, dir), tree(t, to)
	for _, name := range []string{datadir.FileSecret, datadir.FileToken, datadir.FilePorts, registry.RevocationsFile, "nats/stream/1.blk"} {
		if before[name] == "" || before[name] != after[name] {
			t.Errorf("%s: %q, was %q", name, after[name], before[name])
		}
	}
	if len(after) != 7 { // with the lock
		t.Errorf("restored %d files", len(after))
	}
	for name, file := range after {
		if !strings.HasPrefix(file, "-rw------- ") {
			t.Errorf("%s has the mode %.10s", name, file)
		}
	}
	s, err := store.Open(t.Context(), "sqlite", to, quiet)
	if err != nil {
		t.Fatal(err)
	}
	if row, err := s.Find(t.Context(), "aa:bb:cc:dd:ee:ff"); err != nil || row.Device.Name != "lamp" {
		t.Errorf("%+v, %v", row, err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}

	// Only with force into a directory in use; the old database's log goes.
	if err := os.WriteFile(filepath.Join(to, store.FileName+"-wal"), []byte("old log"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Restore(report.Path, to, false, false); err == nil || !strings.Contains(err.Error(), "is not empty") {
		t.Errorf("into a full directory: %v", err)
	}
	if _, err := Restore(report.Path, to, true, false); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(to, store.FileName+"-wal")); err == nil {
		t.Error("the log of the old database is still there")
	}
	running := open(t, to)
	if _, err := Restore(report.Path, to, true, false); err == nil || !strings.Contains(err.Error(), "in use by another fleetd") {
		t.Errorf("under a running node: %v", err)
	}
	running.Close()
}

func TestBackupSaysWhatIsMissing(t *testing.T) {
	dir, cfg := used(t)
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	backup := func(flags map[string]string, streams bool) (BackupReport, error) {
		flags["data-dir"] = dir
		return Backup(t.Context(), load(t, flags), file, streams)
	}
	report, err := backup(map[string]string{}, false)
	if err != nil || len(report.Without) != 1 || !strings.Contains(report.Without[0], "--streams") || report.Path != file {
		t.Errorf("%+v, %v", report, err)
	}
	// Another secret than the directory's: that one opens nothing.
	report, err = backup(map[string]string{"secret": "another secret of the fleet"}, false)
	if err != nil || report.Files != 4 || !strings.Contains(strings.Join(report.Without, " "), "The secret is not in it") {
		t.Errorf("%+v, %v", report, err)
	}
	restored, err := Restore(file, filepath.Join(t.TempDir(), "d"), false, false)
	if err != nil || len(restored.Without) != 1 || !strings.Contains(restored.Without[0], "--secret") {
		t.Errorf("%+v, %v", restored, err)
	}
	report, err = backup(map[string]string{"database": "postgres://fleetd:pass'word@db:5432/fl?sslmode=disable&password=pass2"}, false)
	if text := strings.Join(report.Without, " "); err != nil || report.Schema != 0 || strings.Contains(text, "pass'word") || strings.Contains(text, "pass2") ||
		!strings.Contains(text, "pg_dump --format=custom --no-owner --file='fleetd.dump' 'postgres://fleetd@db:5432/fl?sslmode=disable'") {
		t.Errorf("%+v, %v", report, err)
	}

	// A running node has noted where its database is.
	locked := open(t, dir)
	info := datadir.RunInfo{PID: os.Getpid(), Node: "n1", Database: "postgres://db:5432/fl"}
	if err := datadir.WriteRunInfo(dir, info); err != nil {
		t.Fatal(err)
	}
	if _, err := backup(map[string]string{}, false); err == nil || !strings.Contains(err.Error(), "give --database") {
		t.Errorf("Postgres, not given: %v", err)
	}
	if _, err := backup(map[string]string{"database": "sqlite"}, false); err == nil || !strings.Contains(err.Error(), "the running node uses") {
		t.Errorf("another database: %v", err)
	}
	elsewhere := filepath.Join(t.TempDir(), "else.db")
	if _, err := database.CopySQLite(t.Context(), filepath.Join(dir, store.FileName), elsewhere); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, store.FileName)); err != nil {
		t.Fatal(err)
	}
	info.Database = "sqlite:" + elsewhere
	if err := datadir.WriteRunInfo(dir, info); err != nil {
		t.Fatal(err)
	}
	if report, err := backup(map[string]string{}, false); err != nil || report.Node != "n1" || report.Schema == 0 {
		t.Errorf("%+v, %v", report, err)
	}
	if _, err := backup(map[string]string{}, true); err == nil || !strings.Contains(err.Error(), "while the node runs") {
		t.Errorf("streams of a running node: %v", err)
	}
	locked.Close()

	if err := datadir.RemoveRunInfo(dir); err != nil {
		t.Fatal(err)
	}
	before := tree(t, filepath.Dir(file))
	if _, err := backup(map[string]string{}, false); err == nil || !strings.Contains(err.Error(), "holds no fleetd.db") {
		t.Errorf("no database: %v", err)
	}
	if after := tree(t, filepath.Dir(file)); len(after) != len(before) {
		t.Error("a failed backup leaves files")
	}
	cfg.DataDir = filepath.Join(dir, "nothing")
	if _, err := Backup(t.Context(), cfg, file, false); err == nil || !strings.Contains(err.Error(), "not the data directory of a node") {
		t.Errorf("no directory: %v", err)
	}
}

// entry is one file of an archive made by a test.
type entry struct {
	name, content string
	kind          byte // tar.TypeReg if 0
}

func archiveOf(t *testing.T, m *manifest, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	packed := gzip.NewWriter(&b)
	archive := tar.NewWriter(packed)
	if m != nil {
		text, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		entries = append([]entry{{name: fileManifest, content: string(text)}}, entries...)
	}
	for _, e := range entries {
		header := &tar.Header{Name: e.name, Mode: 0o600, Size: int64(len(e.content)), Typeflag: e.kind}
		if e.kind == tar.TypeSymlink {
			header.Linkname, header.Size, e.content = "/etc/passwd", 0, ""
		}
		if err := archive.WriteHeader(header); err != nil {
			t.Fatal(err)
		}
		if _, err := archive.Write([]byte(e.content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := archive.Close(); err != nil {
		t.Fatal(err)
	}
	if err := packed.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func listed(name, content string) archivedFile {
	sum := sha256.Sum256([]byte(content))
	return archivedFile{Name: name, Size: int64(len(content)), SHA256: hex.EncodeToString(sum[:])}
}

// A file that is not a complete backup of a supported version is refused in one
// sentence, and nothing is written.
func TestRestoreRefuses(t *testing.T) {
	_, cfg := used(t)
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	if _, err := Backup(t.Context(), cfg, file, true); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	made := func(change func(*manifest), entries ...entry) []byte {
		m := &manifest{Kind: archiveKind, Format: archiveFormat, Files: []archivedFile{listed(datadir.FileSecret, "s3cret")}}
		change(m)
		return archiveOf(t, m, entries...)
	}
	same := func(*manifest) {}
	secret := entry{name: datadir.FileSecret, content: "s3cret"}
	cases := []struct {
		name    string
		content []byte
		want    string
	}{
		{"text", []byte("I am no backup"), "is not a backup"},
		{"empty", nil, "is not a backup"},
		{"another archive", archiveOf(t, nil, secret), "is not a backup"},
		{"manifest of something else", made(func(m *manifest) { m.Kind = "x" }, secret), "is not a backup"},
		{"newer format", made(func(m *manifest) { m.Format++ }, secret), "in a newer format"},
		{"newer schema", made(func(m *manifest) { m.Schema, m.Version = 999, "v9" }, secret), "schema version 999"},
		{"older schema", made(func(m *manifest) { m.Schema, m.Version = 22, "v0" }, secret), "commit a749a4a"},
		{"wrong checksum", made(same, entry{name: datadir.FileSecret, content: "5ecret"}), "checksum of secret is wrong"},
		{"wrong size", made(same, entry{name: datadir.FileSecret, content: "s3cret+"}), "differs from its manifest"},
		{"a file is missing", made(same), "secret is missing"},
		{"a file too many", made(same, secret, entry{name: datadir.FilePorts, content: "x"}), "differs from its manifest"},
		{"a file twice", made(same, secret, secret), "differs from its manifest"},
		{"a link", made(func(m *manifest) { m.Files[0] = listed(datadir.FileSecret, "") }, entry{name: datadir.FileSecret, kind: tar.TypeSymlink}), "differs from its manifest"},
	}
	for _, name := range []string{"../secret", "nats/../../x", "/etc/passwd", "nats//x", "run.json", "nats\\x"} {
		cases = append(cases, struct {
			name    string
			content []byte
			want    string
		}{"name " + name, made(func(m *manifest) { m.Files[0].Name = name }, entry{name: name, content: "s3cret"}), "which no backup of fleetd holds"})
	}
	for _, n := range []int{1, 5, 11, 30, len(good) / 3, len(good) - 9, len(good) - 1} {
		cases = append(cases, struct {
			name    string
			content []byte
			want    string
		}{fmt.Sprintf("cut to %d of %d bytes", n, len(good)), good[:n], "is cut off"})
	}
	for _, n := range []int{len(good) / 2, len(good) - 6} {
		flipped := bytes.Clone(good)
		flipped[n] ^= 0xff
		cases = append(cases, struct {
			name    string
			content []byte
			want    string
		}{fmt.Sprintf("byte %d of %d is wrong", n, len(good)), flipped, "is damaged"})
	}
	for _, tc := range cases {
		bad := filepath.Join(t.TempDir(), "bad")
		if err := os.WriteFile(bad, tc.content, 0o600); err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(t.TempDir(), "to")
		_, err := Restore(bad, to, true, false)
		if err == nil || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
		if _, err := os.Stat(to); err == nil {
			t.Errorf("%s: something was written", tc.name)
		}
	}
}
