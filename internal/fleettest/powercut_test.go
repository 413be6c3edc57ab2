package fleettest

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devicetest"
	"fleetd/internal/store/storetest"
)

// What a file system loses in a power cut: ioctl FS_IOC_GOINGDOWN, which ext4
// and XFS share, gives it up with all that is not on the disk.
const (
	goingDown = 0x8004587d // _IOR('X', 125, __u32)
	flushLog  = 1          // names and sizes survive, and file contents do not: as after some seconds
	loseAll   = 2          // both are as the last fsync left them
)

// disk is a file system in a file, mounted while the power is on.
type disk struct{ image, mount string }

func newDisk(t *testing.T, kind string) *disk {
	t.Helper()
	tools := []string{"mount", "umount", "losetup", "mkfs." + kind}
	for _, tool := range tools {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(storetest.NotRun + tool + " is missing")
		}
	}
	dir := t.TempDir()
	d := &disk{filepath.Join(dir, "image"), filepath.Join(dir, "disk")}
	if os.Getuid() != 0 || exec.Command("losetup", "--find").Run() != nil {
		t.Skip(storetest.NotRun + "loop devices need root, and a kernel that has them")
	}
	file, err := os.Create(d.image)
	if err == nil {
		err = file.Truncate(512 << 20)
	}
	if err != nil {
		t.Fatal(err)
	}
	_ = file.Close()
	if err := os.Mkdir(d.mount, 0o700); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs."+kind, "-q", d.image).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.%s: %v\n%s", kind, err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop", d.image, d.mount).CombinedOutput(); err != nil {
		t.Skipf("%s%s cannot be mounted here: %v, %s", storetest.NotRun, kind, err, out)
	}
	t.Cleanup(func() { _ = exec.Command("umount", "-l", d.mount).Run() })
	return d
}

// cut stops the node, gives the file system up, and mounts what is left. The power is that of the processor, too: a node that went on
// beside a file system which has gone down was told by ext4 (Linux 6.18, on a busy machine) that a commit had reached the disk, which had not,
// and sent what it had committed.
func (d *disk) cut(t *testing.T, n *Node, how uint32) {
	t.Helper()
	n.Freeze(t)
	devicetest.Eventually(t, "the node stands still", func() bool {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", n.process.Process.Pid))
		return err != nil || strings.Contains(string(status), "State:\tT")
	})
	dir, err := os.Open(d.mount)
	if err != nil {
		t.Fatal(err)
	}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, dir.Fd(), goingDown, uintptr(unsafe.Pointer(&how)))
	_ = dir.Close()
	if errno != 0 {
		t.Fatalf("the file system does not go down: %v", errno)
	}
	_ = n.process.Process.Kill() // it may have ended for want of its files
	<-n.ended
	devicetest.Eventually(t, "the file system is given back", func() bool { return exec.Command("umount", d.mount).Run() == nil })
	if out, err := exec.Command("mount", "-o", "loop", d.image, d.mount).CombinedOutput(); err != nil {
		t.Fatalf("mount after the cut: %v\n%s", err, out)
	}
}

// promises are the decisions that a node answered, by what they are about.
type promises struct {
	next    int
	names   map[string]string // of devices
	revoked []string          // devices
	keys    map[string]bool   // true: revoked
	secret  string
}

// decide makes decisions until the context ends.
func (p *promises) decide(ctx context.Context, t *testing.T, n *Node) {
	for ctx.Err() == nil {
		if err := p.decideOnce(ctx, n); err != nil && ctx.Err() == nil {
			t.Errorf("a decision was refused: %v", err)
			return
		}
	}
}

// decideOnce names a device and makes a key, and every other time revokes both.
func (p *promises) decideOnce(ctx context.Context, n *Node) error {
	p.next++
	id, name := fmt.Sprintf("02:cc:00:00:%02x:%02x", p.next>>8, p.next&255), fmt.Sprintf("device %d", p.next)
	response, err := askOTA(ctx, n, id)
	if err != nil {
		return err
	}
	_ = response.Body.Close()
	if _, err := n.Patch(ctx, id, api.DeviceEdit{Name: &name}, 0); err != nil {
		return err
	}
	p.names[id] = name
	key, err := n.CreateKey(ctx, api.NewKey{Name: fmt.Sprintf("key-%d", p.next), Scopes: []string{"devices:read"}})
	if err != nil {
		return err
	}
	p.keys[key.ID] = false
	if p.next%2 == 0 {
		return nil
	}
	delete(p.keys, key.ID) // it may be ended without an answer
	if _, err := n.RevokeKey(ctx, key.ID); err != nil {
		return err
	}
	p.keys[key.ID] = true
	if _, err := n.Revoke(ctx, id); err != nil {
		return err
	}
	p.revoked = append(p.revoked, id)
	return nil
}

// check reports whether the node has all that was answered.
func (p *promises) check(t *testing.T, n *Node) {
	t.Helper()
	secret, err := os.ReadFile(filepath.Join(n.Dir, "secret"))
	if err != nil || p.secret != "" && string(secret) != p.secret {
		t.Errorf("the secret is another one: %v", err)
	}
	p.secret = string(secret)
	stored := map[string]api.Device{}
	for _, d := range n.List(t) {
		stored[d.ID] = d
	}
	var lost []string
	for id, name := range p.names {
		if stored[id].Name != name {
			lost = append(lost, name)
		}
	}
	for _, id := range p.revoked {
		if d := stored[id]; d.Admission != "revoked" || d.Credentials.Generation == 0 {
			lost = append(lost, "revocation of "+id)
		}
	}
	keys, err := apiclient.Collect(apiclient.List[api.Key](t.Context(), n.Client, nil, "keys"))
	if err != nil {
		t.Fatal(err)
	}
	state := map[string]string{}
	for _, k := range keys {
		state[k.ID] = k.State
	}
	for id, revoked := range p.keys {
		if state[id] == "" || revoked != (state[id] == "revoked") {
			lost = append(lost, "key "+id)
		}
	}
	// security: N7
	if len(lost) > 0 {
		t.Errorf("of %d answered decisions these are lost: %v", len(p.names)+len(p.revoked)+len(p.keys), lost)
	}
}

// The power fails 20 times on each file system, from the first start on: the
// node starts again each time, and has everything that it had answered.
func TestPowerCuts(t *testing.T) {
	long(t)
	for _, kind := range []string{"ext4", "xfs"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			d := newDisk(t, kind)
			cuts := 0
			how := func() uint32 {
				cuts++
				return []uint32{flushLog, loseAll}[cuts%2]
			}
			// The first start is cut as soon as it has written this.
			for i, first := range []string{"secret", "admin-token", "fleetd.db", "fleetd.db-wal", "run.json"} {
				n := &Node{Dir: filepath.Join(d.mount, fmt.Sprint("node-", i)), programs: programs}
				p := &promises{names: map[string]string{}, keys: map[string]bool{}}
				n.launch(t)
				devicetest.Eventually(t, first+" is there", func() bool {
					_, err := os.Stat(filepath.Join(n.Dir, first))
					return err == nil
				})
				d.cut(t, n, how())
				for _, after := range []time.Duration{30 * time.Millisecond, 300 * time.Millisecond, time.Second} {
					n.Run(t)
					p.check(t, n)
					ctx, cancel := context.WithTimeout(t.Context(), after)
					p.decide(ctx, t, n)
					cancel()
					d.cut(t, n, how())
				}
				n.Run(t)
				p.check(t, n)
				n.Stop(t)
				if len(p.names) == 0 || len(p.revoked) == 0 {
					t.Errorf("%d names and %d revocations were answered", len(p.names), len(p.revoked))
				}
			}
			t.Logf("%d cuts", cuts)
		})
	}
}

// A snapshot of the registry that is damaged, as a power cut left it before it was synced,
// never keeps a node from starting: with a database it goes by that, without one it judges
// nobody. registry.TestSnapshotDamage has all kinds of damage.
func TestDamagedSnapshot(t *testing.T) {
	t.Parallel()
	n := programs.Start(t)
	p := &promises{names: map[string]string{}, keys: map[string]bool{}}
	for range 2 {
		if err := p.decideOnce(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	n.Stop(t)
	snapshot := filepath.Join(n.Dir, registry.SnapshotFile)
	whole, err := os.ReadFile(snapshot)
	if err != nil {
		t.Fatal(err)
	}
	damaged := whole[:len(whole)/2]
	if err := os.WriteFile(snapshot, damaged, 0o600); err != nil {
		t.Fatal(err)
	}
	since := len(n.Log.String())
	n.Run(t)
	p.check(t, n)
	if log := n.Log.String()[since:]; !strings.Contains(log, "snapshot of the registry is not used") {
		t.Error("the log does not say so")
	}

	away := &Node{Dir: t.TempDir(), programs: programs, args: []string{"--database", "postgres://fleetd@127.0.0.1:1/fleetd"}}
	if err := os.WriteFile(filepath.Join(away.Dir, registry.SnapshotFile), damaged, 0o600); err != nil {
		t.Fatal(err)
	}
	away.Run(t)
	t.Cleanup(func() { away.Stop(t) })
	for id := range p.names {
		if status := away.otaStatus(t, id); status != http.StatusServiceUnavailable {
			t.Errorf("without a database: OTA check answered with %d", status)
		}
	}
}

// otaStatus requests the OTA address, as a device does at its start.
func (n *Node) otaStatus(t *testing.T, id string) (status int) {
	t.Helper()
	response, err := askOTA(t.Context(), n, id)
	if err != nil {
		t.Fatal(err)
	}
	_ = response.Body.Close()
	return response.StatusCode
}

func askOTA(ctx context.Context, n *Node, id string) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, n.Info.OTA, strings.NewReader("{}"))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Device-Id", id)
	request.Header.Set("Client-Id", "client "+id)
	return http.DefaultClient.Do(request)
}
