package fleettest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/espimage/imagetest"
)

// The hostile cases of firmware, and their tests. Those in quotation marks are sequences of jobs.TestRollout.
//
//	18 a crash before the check                        TestRolloutFaults, TestBadImageOfARelease; "crash before the check", "crash twice"
//	19 a crash after it                                TestRolloutFaults; "a third start while it stays"; jobs/manager: TestRollbackOnHalt
//	20 bytes that are no image, or a broken one        espimage: TestFaults, TestFlippedBits, FuzzInspect; firmware: TestUploadsWithFaults
//	21 the same version, or a lower one                preflight: TestJudge; simulator/firmware: TestUpgradesThatFail
//	22 a version that the device cannot compare        TestFindingsThatAreAllowed; preflight: TestJudge; simulator/firmware: FuzzOTAToFirmware
//	23 no slots, a small one, an unreadable check      preflight: TestJudge
//	24 another board with the image                    TestRolloutFaults; "another board", "another display"
//	25 an image that names another server              TestForeignServer; preflight: TestJudge; jobs: TestTwoLostAstray; simulator/firmware: TestWrongBoardAndForeignServer
//	26 downloads: cut, slow, stalled, foreign tokens   TestRolloutFaults; "broken three times", "a stalled download"; rollout: TestTokens
//	27 offer, download and check on three nodes        TestRolloutAndKills
//	28 two jobs; an upgrade by hand; at once another   jobs/manager: TestFirmwareJob; "flashed by wire"; rollout: TestNoOffer
//	29 a device that talks; one that sleeps            jobs/runner: TestHold; jobs: TestStagesAreProvable
//	30 approval, clones, revoked, forgotten            rollout: TestNoOffer, TestTasksThatEndAtACheck; "a clone"
//	32 nobody answers checks for a while               "checks that nobody could answer", "no node answered its first start"; rollout: TestOutage; TestRolloutAndKills
//	34 firmware before v1.8.0                          preflight: TestJudge; "one offer for old firmware"; simulator/firmware: TestUpgradesThatFail
//	35 a crash in the download                         "a check after a broken download"
//	36 a restart of a device that is not confirmed     rollout: TestFromCheckToProof
//	37 slots that somebody swapped                     preflight: TestJudge
//	38 a factory image beside slots                    preflight: TestJudge
//	39 self.upgrade_firmware failed                    fleet: TestFailedUpgradeNeedsARestart

// images writes images of the simulator's boards, and returns their files.
func (p Programs) images(t testing.TB, ota, profiles, version string, args ...string) []string {
	t.Helper()
	dir := t.TempDir()
	out, err := exec.Command(p.Simulator, append([]string{"--images", dir, "--profile", profiles, "--image-version", version, "--ota", ota}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.bin"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no images: %v", err)
	}
	return files
}

// add adds firmware files.
func (n *Node) add(t testing.TB, files ...string) {
	t.Helper()
	n.must(t, "added", append([]string{"firmware", "add"}, files...)...)
}

// groupOf returns the jobs of the newest group.
func (n *Node) groupOf(t testing.TB, out string) (list []api.Job) {
	t.Helper()
	var g api.JobGroup
	if err := json.Unmarshal([]byte(out), &g); err != nil || len(g.Items) == 0 {
		t.Fatalf("%v: %s", err, out)
	}
	return g.Items
}

// firmwareOf counts devices by the version that they run.
func (n *Node) firmwareOf(t testing.TB) map[string]int {
	count := map[string]int{}
	for _, d := range n.List(t) {
		count[d.Firmware]++
	}
	return count
}

// A release is rolled out to three boards in stages, each device is proved, and what was done is taken back.
func TestRollout(t *testing.T) {
	t.Parallel()
	const profiles, fleet = "fw-2.4,fw-2.1,robot", 6
	node := programs.Start(t, "--transport", "mqtt")
	sim := programs.Simulate(t, node.Info.OTA, "--devices", "6", "--profile", profiles)
	node.AwaitReady(t, fleet)
	node.AwaitStored(t)
	node.add(t, programs.images(t, node.Info.OTA, profiles, "2.9.0")...)
	node.must(t, "2, 2 connected", "firmware", "roll", "2.9.0", "device=*", "--dry-run")
	if _, errs, status := node.Command(t, "firmware", "roll", "2.9.0", "device=*"); status != 2 || !strings.Contains(errs, "add --yes") {
		t.Errorf("without a yes: %d %s", status, errs)
	}
	out, errs, status := node.Command(t, "firmware", "roll", "2.9.0", "device=*", "--stages", "1,100%", "--stay", "2s", "--yes", "--watch")
	if status != 0 || strings.Count(out, "done: 2 of 2 done, 2 ok") != 3 {
		t.Fatalf("%d %s%s", status, out, errs)
	}
	for _, phase := range []string{" called", " offered", " proving "} {
		if !strings.Contains(out, phase) {
			t.Errorf("no phase%s in\n%s", phase, out)
		}
	}
	node.AwaitStored(t)
	if got := node.firmwareOf(t); got["2.9.0"] != fleet {
		t.Errorf("versions: %v", got)
	}
	if _, errs, status := node.Command(t, "firmware", "roll", "2.9.0", "device=*", "--yes"); status == 0 || !strings.Contains(errs, "not_eligible") || !strings.Contains(errs, "run it already") {
		t.Errorf("once more: %d %s", status, errs)
	}
	var robot api.Device
	for _, d := range node.List(t) {
		if d.Board == "otto-robot" {
			robot = d
		}
	}
	node.must(t, " job\n", "firmware", "explain", robot.ID) // the cause of its image
	node.must(t, ": ok, ", "firmware", "explain", robot.ID)
	if _, errs, status := node.Command(t, "firmware", "rollback", "last", "--yes"); status == 0 || !strings.Contains(errs, "not stored") {
		t.Errorf("a rollback to what nobody has: %d %s", status, errs)
	}
	for _, profile := range strings.Split(profiles, ",") {
		node.add(t, programs.images(t, node.Info.OTA, profile, "")...)
	}
	var group string
	for j, err := range apiclient.List[api.Job](t.Context(), node.Client, nil, "jobs") {
		if err != nil {
			t.Fatal(err)
		}
		group = j.Group
	}
	node.must(t, "is scheduled", "firmware", "rollback", group, "--yes")
	node.Await(t, "the devices have what they had", time.Minute, func() bool { return node.firmwareOf(t)["2.9.0"] == 0 })
	if r := sim.Report(t); r.Totals.Upgrades != 2*fleet || r.Totals.UpgradesFailed != 0 || r.Totals.Rollbacks != 0 {
		t.Errorf("%d upgrades, %d failed, %d rolled back", r.Totals.Upgrades, r.Totals.UpgradesFailed, r.Totals.Rollbacks)
	}
}

// What goes wrong on the first device reaches no other: the job halts, and the devices are flashed as often as the rows say.
func TestRolloutFaults(t *testing.T) {
	t.Parallel()
	node := programs.startWith(t, []string{"FLEETD_TEST_TIME_SCALE=0.1"}, "--transport", "mqtt")
	const each = 3
	faults := []struct {
		name            string
		code            string // of the task that began
		state, reason   string // of the job; empty: it goes on
		flashes         int
		upgrades, rolls uint64
		sim             *Simulation
		job, device     string // and that with which it began
	}{
		{name: "crash-boot", code: "rolled_back", state: "halted", reason: "stop", flashes: 1, upgrades: 1, rolls: 1},
		{name: "crash-later", code: "boot_loop", state: "halted", reason: "stop", flashes: 1, upgrades: 1},
		{name: "reject-image", code: "image_refused", state: "halted", reason: "stop", flashes: 1},
		{name: "wrong-board", code: "board_changed", state: "halted", reason: "board_changed", flashes: 1, upgrades: 1},
		{name: "cut-download"},
		{name: "power-cut"},
	}
	for i := range faults {
		f := &faults[i]
		f.sim = programs.Simulate(t, node.Info.OTA, "--devices", "3", "--mac-base", "02:f1:ee:0"+string(rune('1'+i))+":00:00", "--fault", f.name)
	}
	node.AwaitReady(t, each*len(faults))
	node.AwaitStored(t)
	node.add(t, programs.images(t, node.Info.OTA, "fw-2.4", "2.9.0", "--image-size", "1000000")...)
	for i := range faults {
		f := &faults[i]
		out, errs, status := node.Command(t, "firmware", "roll", "2.9.0", "device=02:f1:ee:0"+string(rune('1'+i))+":*", "--stay", "1m", "--yes", "--json")
		if status != 0 {
			t.Fatalf("%s: %d %s", f.name, status, errs)
		}
		f.job = node.groupOf(t, out)[0].ID
	}
	for i := range faults {
		f := &faults[i]
		var begun api.Task
		node.Await(t, f.name+": the first device has come to its end", time.Minute, func() bool {
			j, err := node.Job(t.Context(), f.job)
			if err != nil || f.state != "" && (j.State != f.state || j.Reason != f.reason) {
				return false
			}
			for task, err := range apiclient.List[api.Task](t.Context(), node.Client, nil, "jobs", f.job, "tasks") {
				if err == nil && task.Firmware != nil && task.Code == f.code && task.Firmware.Offers > 0 && (f.state != "" || task.State == "waiting") {
					begun = task
					return true
				}
			}
			return false
		})
		if begun.Firmware == nil {
			continue
		}
		f.device = begun.Device
		if begun.Firmware.Flashes != f.flashes || begun.Firmware.Offers != 1 || begun.Firmware.Restarts != 1 {
			t.Errorf("%s: %+v", f.name, begun.Firmware)
		}
	}
	for i := range faults {
		f := &faults[i]
		if f.code != "" {
			node.must(t, ", "+f.code, "firmware", "explain", f.device)
		}
		if f.code == "rolled_back" {
			if events := node.storedEvents(t, node.Token(t), f.device, "firmware"); !strings.Contains(events, `"cause":"rolled_back"`) {
				t.Errorf("%s: events %s", f.name, events)
			}
		}
		begun := 0
		for task, err := range apiclient.List[api.Task](t.Context(), node.Client, nil, "jobs", f.job, "tasks") {
			if err == nil && task.Firmware != nil {
				begun++
			}
		}
		// security: D28
		if r := f.sim.Report(t); begun != 1 || r.Totals.Upgrades != f.upgrades || r.Totals.Rollbacks != f.rolls {
			t.Errorf("%s: %d tasks began; %d upgrades, %d rolled back", f.name, begun, r.Totals.Upgrades, r.Totals.Rollbacks)
		}
	}
}

// A finding that can be allowed blocks a device whatever else is allowed; once it is allowed, the device gets the image. What cannot be allowed is
// never offered, also to a device that has come to deserve it since the rollout began.
func TestFindingsThatAreAllowed(t *testing.T) {
	t.Parallel()
	node := programs.Start(t)
	former, next := strings.Repeat("0f", 32), strings.Repeat("0e", 32)
	const assets = `,{"label":"assets","type":1,"subtype":130,"address":8388608,"size":8388608}`
	codes := []string{"project", "layout", "version_too_old", "ota_url"}
	for i, c := range []struct{ code, from, to string }{{"project", `"name":"xiaozhi"`, `"name":"mine"`}, {"layout", assets, ""}, {"version_too_old", `"version":"2.4.1"`, `"version":"1.7.7"`},
		{"ota_url", "", ""}, {"version_aborts", `"version":"2.4.1"`, `"version":"v2.4.2-dirty"`}} {
		device, literals := fmt.Sprintf("02:00:00:00:a1:%02x", i), imagetest.Literals(c.code)
		if c.code != "ota_url" {
			literals[1] = node.Info.OTA
		}
		raw := imagetest.Build{Chip: 9, ELF: byte(i + 1), Literals: literals}.Image()
		file := filepath.Join(t.TempDir(), "image.bin")
		if err := os.WriteFile(file, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		node.add(t, file)
		image := node.image(t, node.imageOf(t, c.code))
		fit := checkBody(c.code, former, 1<<20)
		body := strings.Replace(fit, c.from, c.to, 1)
		before := body
		if c.code == "version_aborts" {
			before = fit
		}
		for range 2 {
			node.CheckIn(t, device, before)
			node.AwaitStored(t)
		}
		roll := []string{"firmware", "roll", image.ID, device, "--gates", "boot", "--stages", "100%", "--restart", "never", "--yes"}
		for _, code := range codes {
			if code != c.code {
				roll = append(roll, "--allow", code)
			}
		}
		if slices.Contains(codes, c.code) {
			if _, errs, status := node.Command(t, roll...); status != 2 || !strings.Contains(errs, "allow "+c.code) {
				t.Errorf("%s is not allowed: %d %s", c.code, status, errs)
			}
			roll = append(roll, "--allow", c.code)
		}
		var job api.Job
		if err := json.Unmarshal([]byte(node.must(t, "", append(roll, "--json")...)), &job); err != nil {
			t.Fatal(err)
		}
		ended := func() (task api.Task) {
			for task = range apiclient.List[api.Task](t.Context(), node.Client, nil, "jobs", job.ID, "tasks") {
				break
			}
			return task
		}
		var reply struct{ Firmware *struct{ URL string } }
		node.Await(t, c.code+": an offer, or the end of the task", 30*time.Second, func() bool { // the node learns of the job meanwhile
			if err := json.Unmarshal([]byte(node.CheckIn(t, device, body)), &reply); err != nil {
				t.Fatal(err)
			}
			return reply.Firmware != nil || ended().Outcome != ""
		})
		if offered := reply.Firmware != nil; offered != slices.Contains(codes, c.code) {
			t.Errorf("%s: offered %+v", c.code, reply.Firmware)
		}
		if reply.Firmware == nil {
			if task := ended(); task.Outcome != "refused" || task.Code != c.code {
				t.Errorf("%s: %+v", c.code, task)
			}
			continue
		}
		answer, err := http.Get(reply.Firmware.URL)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		if err != nil || !bytes.Equal(got, raw) {
			t.Errorf("%s: %d bytes, error %v", c.code, len(got), err)
		}
		for _, step := range []struct{ elf, cause string }{{image.ELF, "job"}, {next, "foreign"}} {
			node.CheckIn(t, device, strings.Replace(body, former, step.elf, 1))
			node.AwaitStored(t)
			node.must(t, " "+step.cause, "firmware", "explain", device)
		}
		if task := ended(); task.Outcome != "ok" {
			t.Errorf("%s: %+v", c.code, task)
		}
	}
}

// The first device that an image takes to another server is lost, and nobody else gets the image.
func TestForeignServer(t *testing.T) {
	t.Parallel()
	node := programs.startWith(t, []string{"FLEETD_TEST_TIME_SCALE=0.03"}, "--transport", "mqtt")
	elsewhere := programs.Start(t)
	sim := programs.Simulate(t, node.Info.OTA, "--devices", "3", "--fault", "foreign-server", "--time-scale", "0.1")
	node.AwaitReady(t, 3)
	node.AwaitStored(t)
	node.add(t, programs.images(t, elsewhere.Info.OTA, "fw-2.4", "2.9.0")...)
	if _, errs, status := node.Command(t, "firmware", "roll", "2.9.0", "device=*", "--yes"); status != 2 || !strings.Contains(errs, "allow ota_url") {
		t.Errorf("%d %s", status, errs)
	}
	out, errs, status := node.Command(t, "firmware", "roll", "2.9.0", "device=*", "--allow", "ota_url", "--yes", "--json")
	if status != 0 {
		t.Fatalf("%d %s", status, errs)
	}
	job := node.groupOf(t, out)[0].ID
	node.Await(t, "the job halts with the first device", time.Minute, func() bool {
		j, err := node.Job(t.Context(), job)
		return err == nil && j.State == "halted" && j.Reason == "stop" && j.Counts.Failed == 1 && j.Counts.Waiting == 2
	})
	node.must(t, ", lost, ", "firmware", "explain", elsewhere.List(t)[0].ID)
	// security: D28
	if r := sim.Report(t); r.Totals.Upgrades != 1 {
		t.Errorf("%d upgrades", r.Totals.Upgrades)
	}
}

// A release of three boards begins with one device of each. The job whose image is bad halts, and the others go on.
func TestBadImageOfARelease(t *testing.T) {
	t.Parallel()
	node := programs.Start(t, "--transport", "mqtt")
	profiles := []string{"fw-2.4", "fw-2.1", "robot"}
	var sims []*Simulation
	for i, profile := range profiles {
		args := []string{"--devices", "3", "--profile", profile, "--mac-base", fmt.Sprintf("02:f1:ee:0%d:00:00", i)}
		if profile == "robot" {
			args = append(args, "--fault", "crash-boot")
		}
		sims = append(sims, programs.Simulate(t, node.Info.OTA, args...))
	}
	node.AwaitReady(t, 9)
	node.AwaitStored(t)
	node.add(t, programs.images(t, node.Info.OTA, strings.Join(profiles, ","), "2.9.0")...)
	out, errs, status := node.Command(t, "firmware", "roll", "2.9.0", "device=*", "--stay", "1s", "--yes", "--json")
	if status != 0 {
		t.Fatalf("%d %s", status, errs)
	}
	group := node.groupOf(t, out)
	if len(group) != 3 {
		t.Fatalf("%d jobs", len(group))
	}
	node.Await(t, "one device of each board has come to an end", time.Minute, func() bool {
		proved, halted := int64(0), 0
		for _, j := range group {
			now, err := node.Job(t.Context(), j.ID)
			if err != nil {
				return false
			}
			proved += now.Counts.OK
			if now.State == "halted" && now.Reason == "stop" {
				halted++
			}
		}
		return proved == 2 && halted == 1
	})
	// security: D28
	for i, sim := range sims {
		r, rolledBack := sim.Report(t), uint64(0)
		if profiles[i] == "robot" {
			rolledBack = 1
		}
		if r.Totals.Upgrades != 1 || r.Totals.Rollbacks != rolledBack {
			t.Errorf("%s: %d upgrades, %d rolled back", profiles[i], r.Totals.Upgrades, r.Totals.Rollbacks)
		}
	}
}

// A release is rolled out over three nodes whose clocks are an hour apart, while nodes are killed and stopped in whatever phase the devices
// are, and the database is away for a while: every device ends with the image or a reason, the simulator counts as many flashes as the rows, and no
// device is told to restart more often than three times.
func TestRolloutAndKills(t *testing.T) {
	long(t)
	t.Parallel()
	devices := setting(t, "FLEETD_TEST_ROLLOUT", 60)
	c := programs.StartCluster(t, ClusterOptions{Seed: 38, Clocks: []time.Duration{0, time.Hour, -time.Hour}, Args: []string{"--transport", "mqtt", "--firmware-downloads", "1000", "--drain-window", "2s",
		"--trusted-proxies", "127.0.0.0/8"},
		Env: []string{"FLEETD_TEST_TIME_SCALE=0.1"}})
	sim := programs.Simulate(t, c.OTA, "--devices", fmt.Sprint(devices), "--reconnect", "300ms", "--reconnect-jitter", "500ms", "--time-scale", "0.2", "--profile", "fw-2.4,fw-2.1,robot",
		"--fault", fmt.Sprintf("power-cut:%d", devices/10)) // each once, in the middle of its download
	c.AwaitReady(t, devices, 2*time.Minute)
	for _, n := range c.Nodes {
		n.AwaitStored(t)
	}
	node := c.Nodes[0]
	node.add(t, programs.images(t, c.OTA, "fw-2.4,fw-2.1,robot", "2.9.0", "--image-size", "200000")...)
	node.Await(t, "all nodes have written their checks", time.Minute, func() bool {
		out, _, status := node.Command(t, "firmware", "check", "2.9.0", "--json")
		var check api.FirmwareCheck
		return status == 0 && json.Unmarshal([]byte(strings.SplitN(out, "\n", 2)[0]), &check) == nil && check.Counts.Findings["chip"] == 0
	})
	out, errs, status := node.Command(t, "firmware", "roll", "2.9.0", "device=*", "--stages", "100%", "--concurrency", fmt.Sprint(max(40, devices/20)), "--rate", "unlimited", "--stay", "1s", "--stop", "100%", "--yes", "--json")
	if status != 0 {
		t.Fatalf("%d %s", status, errs)
	}
	group := node.groupOf(t, out)
	// A device that was told three times to restart, or that may have an unconfirmed image, waits for its next start, which nobody makes here.
	settled := func(task *api.Task) bool {
		return task.State == "ended" || task.State == "waiting" && task.Firmware != nil && (task.Firmware.Restarts == 3 && task.DueAt.IsZero() || task.Code == "image_refused")
	}
	ended := func() bool {
		tasks := 0
		for _, j := range group {
			now, err := c.Nodes[0].Job(t.Context(), j.ID)
			if err != nil || now.Counts.Running > 0 {
				return false
			}
			if now.State == "halted" {
				_, _ = apiclient.Send[api.Job](t.Context(), c.Nodes[0].Client, apiclient.JobVerb(j.ID, "resume", "", nil))
			}
			for task, err := range apiclient.List[api.Task](t.Context(), c.Nodes[0].Client, nil, "jobs", j.ID, "tasks") {
				if err != nil || !settled(&task) {
					return false
				}
				tasks++
			}
		}
		return tasks == devices
	}
	begun, kills := time.Now(), 0
	for ; !ended(); kills++ {
		if time.Since(begun) > 12*time.Minute+time.Duration(devices)*time.Second/4 { // some may wait the hour, which is six minutes here
			t.Error("the devices have not come to an end")
			break
		}
		time.Sleep(3 * time.Second)
		switch n := c.Nodes[kills%3]; {
		case kills == 4:
			c.BreakSQL(Cut)
			time.Sleep(6 * time.Second)
			c.Mend()
		case kills > 9: // they have to come to an end
		case kills%2 == 0:
			n.Kill(t)
			n.Run(t)
		default:
			n.Stop(t)
			n.Run(t)
		}
	}
	flashes, outcomes := 0, map[string]int{}
	for _, j := range group {
		for task, err := range apiclient.List[api.Task](t.Context(), c.Nodes[0].Client, nil, "jobs", j.ID, "tasks") {
			if err != nil {
				t.Fatal(err)
			}
			outcomes[strings.TrimSpace(task.State+" "+task.Outcome+" "+task.Code+" "+task.Reason)]++
			if !settled(&task) {
				t.Logf("job %s, device %s: %s %s until %v, %+v", j.ID, task.Device, task.State, task.Reason, task.DueAt, task.Firmware)
			}
			if task.Code == "check_unreadable" { // a simulated network has a quote in its name
				devices--
			} else if task.Outcome != "ok" && task.Outcome != "failed" && task.Outcome != "already" && task.State == "ended" { // those that wait have another restart before them
				t.Errorf("device %s: %s %s %s", task.Device, task.Outcome, task.Code, task.Detail)
			}
			if f := task.Firmware; f != nil {
				flashes += f.Flashes
				// security: D28
				if f.Restarts > 3 || f.Flashes > 3 || f.Offers > 5 { // one flash does not count, if no node answered the first check after it
					t.Errorf("device %s: %+v", task.Device, f)
				}
			}
		}
	}
	r := sim.Report(t)
	t.Logf("%v, %d kills and outages: %v; %d flashes in the rows, %d upgrades, %d failed, %d rolled back", time.Since(begun).Round(time.Second), kills, outcomes, flashes, r.Totals.Upgrades, r.Totals.UpgradesFailed, r.Totals.Rollbacks)
	if outcomes["ended ok"] < devices*2/3 || uint64(flashes) != r.Totals.Upgrades {
		t.Errorf("%d of %d devices are proved; %d flashes in the rows, %d of the simulator", outcomes["ended ok"], devices, flashes, r.Totals.Upgrades)
	}
}
