package jobs

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
)

// rolled is a firmware job with one task, at a time that moves on.
type rolled struct {
	t    *testing.T
	job  Job
	task Task
	now  time.Time
	bar  string

	answering time.Time // since when nodes answer checks
}

func newRolled(t *testing.T, edit func(*api.JobSpec)) *rolled {
	now := time.Unix(1_800_000_000, 0).UTC()
	spec := api.JobSpec{Select: "device=*", Action: api.JobAction{Firmware: &api.JobFirmware{Image: strings.Repeat("a", 64)}}}
	if edit != nil {
		edit(&spec)
	}
	if err := Check(&spec, time.UTC, now); err != nil {
		t.Fatal(err)
	}
	r := &rolled{t: t, job: New(spec, "admin", "admin", "device=*", now), now: now}
	if !r.job.Fire(now) {
		t.Fatal("the job does not fire")
	}
	r.job.Added(1, nil, 0)
	r.job.Prepared(now)
	r.task = Task{Job: r.job.ID, Device: "x", State: TaskWaiting}
	return r
}

const (
	oldELF = "old"
	newELF = "new"
)

func checkOf(elf string) *DeviceCheck {
	return &DeviceCheck{ELF: elf, Board: "bread", Hardware: "esp32s3 2", Display: "320x240", From: "192.0.2.7"}
}

// do makes steps by their names, as they would come from checks, downloads and connections.
func (r *rolled) do(names ...string) {
	r.t.Helper()
	for _, name := range names {
		s := Step{Job: &r.job, Task: &r.task, Now: r.now, Answering: r.answering}
		verb, arg, _ := strings.Cut(name, " ")
		switch verb {
		case "wait":
			d, err := time.ParseDuration(arg)
			if err != nil {
				r.t.Fatal(err)
			}
			r.now = r.now.Add(d)
		case "outage": // of all nodes, until now
			r.answering = r.now
		case "call":
			if !s.MayBegin(false) {
				r.t.Fatalf("%v: no restart may be sent: %+v %+v", names, r.task, r.task.Rollout)
			}
			s.Device(checkOf(oldELF), newELF, arg == "foreign", false)
			s.Call()
		case "check": // of the former image, that wants an offer
			s.See(checkOf(oldELF))
			switch {
			case s.Task.State == TaskEnded:
			case s.CanRepeat():
				s.OfferAgain()
			case s.Runs() && s.MayOffer() || !s.Runs() && s.MayBegin(true):
				s.Device(checkOf(oldELF), newELF, arg == "foreign", arg == "single")
				s.Offer("token", "192.0.2.7", 1000)
			default:
				s.GiveBack()
			}
		case "new":
			s.See(checkOf(newELF))
		case "see":
			c := checkOf(oldELF)
			switch arg {
			case "clone":
				c.Hardware = "esp32 1"
			case "other":
				c.ELF = "third"
			case "board":
				c.ELF, c.Board = newELF, "lamp"
			case "display":
				c.ELF, c.Display = newELF, "1x1"
			case "unreadable":
				c.Hardware, c.Display = "", ""
			}
			s.See(c)
		case "get":
			s.Fetch("192.0.2.7", false)
		case "stranger":
			if s.Fetch("192.0.2.8", false) {
				r.t.Fatalf("%v: a GET from elsewhere counts", names)
			}
		case "half":
			s.Loaded(500)
		case "all":
			s.Loaded(1000)
		case "break":
			s.Break()
		case "cut":
			s.Cut()
		case "connect":
			s.Connect()
		case "pass":
			s.Pass(arg)
		case "fail":
			s.FailGate(arg, "it did not")
		case "expire":
			s.Heard = arg == "heard"
			s.Expire()
		case "correct":
			c := checkOf(newELF)
			switch arg {
			case "board":
				c.Board = "lamp"
			case "display":
				c.Display = "1x1"
			case "unreadable":
				c.Hardware, c.Display = "", ""
			}
			s.Correct(c)
		case "back": // a later check, of the image that the job has replaced
			s.Correct(checkOf(oldELF))
		case "already":
			s.Already()
		case "pause":
			if err := r.job.Pause(""); err != nil {
				r.t.Fatal(err)
			}
		case "cancel":
			if err := r.job.Cancel(r.now); err != nil {
				r.t.Fatal(err)
			}
		default:
			r.t.Fatalf("no step %q", name)
		}
		if s.Bar != "" {
			r.bar = s.Bar
		}
		r.job.Settle(r.now)
		c := &r.job.Counts
		if n := c.Total(); n != 1 || r.job.Harmed < 0 || r.job.Held < 0 || (r.task.State == TaskRunning) != (c.Running == 1) || (r.task.State == TaskWaiting) != (c.Waiting == 1) || r.job.Held > c.Waiting {
			r.t.Fatalf("%v, after %q: counts %+v, harmed %d, held %d, task %+v", names, name, *c, r.job.Harmed, r.job.Held, r.task)
		}
	}
}

// outcome is how the task stands: its state, phase, outcome and code, and the job's if that is halted.
func (r *rolled) outcome() string {
	text := string(r.task.State)
	if r.task.Phase != "" {
		text += " " + string(r.task.Phase)
		if r.task.Rollout.Gate != "" {
			text += " " + r.task.Rollout.Gate
		}
	}
	if r.task.Outcome != "" {
		text = strings.TrimSpace(string(r.task.Outcome) + " " + r.task.Code)
	}
	if r.job.State == Halted {
		text += ", halted " + r.job.Reason
	}
	if r.bar != "" {
		text += ", barred"
	}
	return text
}

func TestRollout(t *testing.T) {
	twoFailures := func(s *api.JobSpec) { s.Stop = &api.JobStop{Failed: 2} }
	loose := func(s *api.JobSpec) { s.Stop = &api.JobStop{Failed: 100} }
	never := func(s *api.JobSpec) { s.Action.Firmware.Restart = "never" }
	boot := func(s *api.JobSpec) { s.Action.Firmware.Gates = []string{"boot"} }
	installed := []string{"call", "check", "get", "half", "all", "new"}
	steps := func(more ...string) []string { return append(installed[:len(installed):len(installed)], more...) }
	for _, c := range []struct {
		name  string
		edit  func(*api.JobSpec)
		steps []string
		want  string
	}{
		{"it works", nil, steps("connect", "pass tools", "pass status", "wait 11m", "expire"), "ok"},
		{"it worked, and came back with the former image", nil, steps("connect", "pass tools", "pass status", "wait 11m", "expire", "back"), "failed rolled_back"},
		{"it worked, came back with the former image, and worked", nil, steps("connect", "pass tools", "pass status", "wait 11m", "expire", "back", "correct"), "ok"},
		{"before it has stayed up", nil, steps("connect", "pass tools", "pass status", "wait 9m", "expire"), "running proving stay"},
		{"without a restart", never, []string{"check", "get", "all", "new", "connect", "pass tools", "pass status", "wait 11m", "expire"}, "ok"},
		{"boot is enough", boot, steps(), "ok"},
		{"a second start while it stays", nil, steps("connect", "pass tools", "pass status", "new"), "running proving stay"},
		{"a third start while it stays", nil, steps("connect", "pass tools", "pass status", "new", "new"), "failed boot_loop, halted stop"},
		{"it lost a tool", nil, steps("connect", "fail tools"), "failed gate_tools, halted stop"},
		{"it answers nothing", nil, steps("connect", "pass tools", "fail status"), "failed gate_status, halted stop"},
		{"it does not connect", nil, steps("wait 4m", "expire"), "failed gate_connect, halted stop"},
		{"back to the former image", nil, steps("connect", "check"), "failed rolled_back, halted stop"},

		{"crash before the check", nil, []string{"call", "check", "get", "all", "check"}, "waiting, halted stop"},
		{"crash twice", twoFailures, []string{"call", "check", "get", "all", "check", "wait 11m", "check", "get", "all", "check"}, "failed rolled_back, barred"},
		{"no node answered its first start", nil, []string{"call", "check", "get", "all", "wait 1m", "outage", "check"}, "waiting"},
		{"no node answered, and no offer soon", nil, []string{"call", "check", "get", "all", "wait 1m", "outage", "check", "wait 9m", "check"}, "waiting"},
		{"no node answered its first start twice", nil, []string{"call", "check", "get", "all", "wait 1m", "outage", "check", "wait 11m", "check", "get", "all", "wait 1m", "outage", "check"}, "waiting, halted stop"},
		{"no node answered, and crash twice", loose, []string{"call", "check", "get", "all", "wait 1m", "outage", "check", "wait 11m", "check", "get", "all", "check", "wait 11m", "check", "get", "all", "check"}, "failed rolled_back, barred"},
		{"no node answered before the flash", nil, []string{"call", "check", "outage", "get", "all", "wait 1m", "check"}, "waiting, halted stop"},
		{"lost at the second flash", loose, []string{"call", "check", "get", "all", "check", "wait 11m", "check", "get", "all", "wait 16m", "expire"}, "failed lost, barred"},
		{"flashed by wire after the second flash", loose, []string{"call", "check", "get", "all", "check", "wait 11m", "check", "get", "all", "see other"}, "failed other_image, barred"},
		{"no third flash soon", twoFailures, []string{"call", "check", "get", "all", "check", "wait 1m", "check"}, "waiting"},
		{"the device refuses it", nil, []string{"call", "check", "get", "all", "connect"}, "waiting, halted stop"},
		{"lost", nil, []string{"call", "check", "get", "all", "wait 16m", "expire"}, "failed lost, halted stop"},
		{"lost, and there after all", nil, []string{"call", "check", "get", "all", "wait 16m", "expire", "correct"}, "ok, halted stop"},
		{"lost, and there as another board", nil, []string{"call", "check", "get", "all", "wait 16m", "expire", "correct board"}, "failed board_changed, halted stop"},
		{"lost, and there with another display", loose, []string{"call", "check", "get", "all", "wait 16m", "expire", "correct display"}, "failed board_changed"},
		{"lost, and there with an unreadable check", loose, []string{"call", "check", "get", "all", "wait 16m", "expire", "correct unreadable"}, "ok"},
		{"the wrong board, and there", nil, []string{"call", "check", "get", "all", "see board", "correct"}, "failed board_changed, halted board_changed"},
		{"another board", nil, []string{"call", "check", "get", "all", "see board"}, "failed board_changed, halted board_changed"},
		{"another display", nil, []string{"call", "check", "get", "all", "see display"}, "failed board_changed, halted board_changed"},
		{"flashed by wire", nil, []string{"call", "check", "get", "all", "see other"}, "failed other_image, halted stop"},
		{"flashed by wire before", nil, []string{"call", "see other"}, "waiting"},
		{"a clone", nil, []string{"call", "check", "see clone"}, "refused contested"},
		{"an unreadable check is no clone", nil, []string{"call", "check", "see unreadable"}, "running offered"},

		{"nobody saw the last byte", nil, []string{"call", "check", "get", "half", "new"}, "running proving connect"},
		{"the node stopped after the last byte", nil, []string{"call", "check", "get", "half", "cut", "new"}, "running proving connect"},
		{"it counted as broken", nil, []string{"call", "check", "get", "break", "new"}, "running proving connect"},
		{"no check", nil, []string{"call", "wait 4m", "expire"}, "waiting"},
		{"checks that nobody could answer", nil, []string{"call", "wait 4m", "expire heard", "wait 10m", "call", "wait 4m", "expire heard"}, "waiting"},
		{"no check twice", nil, []string{"call", "wait 4m", "expire", "wait 10m", "call", "wait 4m", "expire"}, "failed no_check, halted stop"},
		{"no GET", nil, []string{"call", "check", "wait 2m", "expire"}, "waiting"},
		{"the answer was lost, and the offer given up", nil, []string{"call", "check", "wait 2m", "expire", "check"}, "running offered"},
		{"given up, and fetched after all", nil, []string{"call", "check", "wait 2m", "expire", "check", "get"}, "running loading"},
		{"given up long ago", nil, []string{"call", "check", "wait 4m", "expire", "check"}, "waiting"},
		{"given up by a paused job", nil, []string{"call", "check", "wait 2m", "expire", "pause", "check"}, "waiting"},
		{"a late GET", nil, []string{"call", "check", "wait 2m", "expire", "get"}, "running loading"},
		{"a late GET of an image that crashes", nil, []string{"call", "check", "wait 2m", "expire", "get", "all", "check"}, "waiting, halted stop"},
		{"a late GET of a paused job", nil, []string{"call", "check", "wait 2m", "expire", "pause", "get"}, "waiting"},
		{"another GET after a broken one", nil, []string{"call", "check", "get", "break", "get"}, "waiting"},
		{"another GET after a flash", loose, []string{"call", "check", "get", "all", "connect", "get"}, "waiting"},
		{"another GET after the node stopped", nil, []string{"call", "check", "get", "half", "cut", "get"}, "waiting"},
		{"a late GET from elsewhere", nil, []string{"call", "check", "wait 2m", "expire", "stranger"}, "waiting"},
		{"GET from elsewhere", nil, []string{"call", "check", "stranger"}, "running offered"},
		{"the answer was lost", nil, []string{"call", "check", "wait 1m", "check", "check"}, "running offered"},
		{"offered five times", nil, []string{"call", "check", "wait 4m", "check", "wait 4m", "check", "wait 4m", "check", "wait 4m", "check", "wait 4m", "check"}, "failed not_fetched, halted stop"},
		{"broken", nil, []string{"call", "check", "get", "half", "break"}, "waiting"},
		{"broken, and offered too early", nil, []string{"call", "check", "get", "half", "break", "wait 9m", "check"}, "waiting"},
		{"broken twice", nil, []string{"call", "check", "get", "break", "wait 11m", "check", "get", "break", "wait 59m", "check"}, "waiting"},
		{"broken three times", nil, []string{"call", "check", "get", "break", "wait 11m", "check", "get", "break", "wait 61m", "check", "get", "break"}, "failed download, halted stop"},
		{"two broken ones bar nobody", nil, []string{"call", "check", "get", "break", "wait 11m", "check", "get", "break", "wait 61m", "check", "get", "all", "new"}, "running proving connect"},
		{"a check after a broken download", nil, []string{"call", "check", "get", "half", "check"}, "waiting"},
		{"a stalled download", nil, []string{"call", "check", "get", "wait 46s", "expire"}, "waiting"},
		{"the node stopped", nil, []string{"call", "check", "get", "half", "cut", "check"}, "running offered"},
		{"one offer for old firmware", nil, []string{"check single", "get", "break"}, "failed download, halted stop"},

		{"paused before the offer", nil, []string{"call", "pause", "check"}, "waiting"},
		{"paused in the download", nil, []string{"call", "check", "get", "pause", "all", "new"}, "running proving connect"},
		{"cancelled before the offer", nil, []string{"call", "cancel", "check"}, "cancelled"},
		{"cancelled in the download", boot, []string{"call", "check", "get", "cancel", "all", "new"}, "ok"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRolled(t, c.edit)
			r.do(c.steps...)
			// security: D28
			if got := r.outcome(); got != c.want {
				t.Errorf("%q, want %q; %+v", got, c.want, r.task.Rollout)
			}
		})
	}
}

// What was counted stays within its bounds, whatever comes in which order.
func TestRolloutIsBounded(t *testing.T) {
	for _, c := range []struct {
		steps                     []string
		offers, flashes, restarts int
	}{
		{[]string{"call", "check", "wait 1m", "check"}, 1, 0, 1},
		{[]string{"call", "check", "wait 2m", "expire", "check"}, 1, 0, 1},
		{[]string{"call", "check", "wait 4m", "check"}, 2, 0, 1},
		{[]string{"call", "check", "get", "half", "cut"}, 0, 0, 1},
		{[]string{"call", "check", "get", "all", "new"}, 1, 1, 1},
		{[]string{"call", "wait 4m", "expire", "wait 7m", "call", "check"}, 1, 0, 2},
		{[]string{"call", "check", "get", "half", "new"}, 1, 1, 1},
		{[]string{"call", "check", "get", "break", "new"}, 1, 1, 1},
		// No check after the flash could be recorded.
		{[]string{"call", "check", "get", "break", "already"}, 1, 1, 1},
		{[]string{"call", "check", "get", "all", "connect", "already"}, 1, 1, 1},
		{[]string{"call", "check", "get", "all", "connect", "new"}, 1, 1, 1},
		{[]string{"call", "wait 4m", "expire", "already"}, 0, 0, 1},
	} {
		r := newRolled(t, nil)
		r.do(c.steps...)
		if got := r.task.Rollout; got.Offers != c.offers || got.Flashes != c.flashes || got.Restarts != c.restarts {
			t.Errorf("%v: %+v", c.steps, got)
		}
	}
	for seed := range 2000 {
		r := newRolled(t, func(s *api.JobSpec) { s.Stop = &api.JobStop{Failed: 100} })
		names := []string{"wait 1m", "wait 11m", "check", "new", "get", "half", "all", "break", "cut", "connect", "pass tools", "pass status", "expire", "see other", "see board"}
		n := seed
		for range 40 {
			if r.task.State == TaskEnded {
				break
			}
			n = n*1103515245 + 12345
			name := names[(n>>16&0x7fff)%len(names)]
			if s := (&Step{Job: &r.job, Task: &r.task, Now: r.now}); s.MayBegin(false) && n>>8&1 == 0 {
				name = "call"
			}
			r.do(name)
			// security: D28
			if x := r.task.Rollout; x != nil && (x.Offers > MaxOffers || x.Flashes > MaxFlashes || x.Restarts > MaxRestarts || x.Offers < 0) {
				t.Fatalf("seed %d: %+v", seed, x)
			}
		}
	}
}

// Shares of stages are of the devices that may get the image: 5 % of 2,000 of which 100 may are five, four after the first one.
func TestSharesOfEligibleDevices(t *testing.T) {
	r := newRolled(t, nil)
	j := &r.job
	j.State, j.RoundN, j.Counts = Preparing, 0, Counts{}
	j.Added(2000, map[Outcome]int{Refused: 1800, Already: 100}, 0)
	j.Prepared(r.now)
	if room := j.Room(r.now); room.fresh != 1 {
		t.Fatalf("the first stage opens %d", room.fresh)
	}
	j.Start(r.now, &Task{})
	j.Record(&Task{Attempt: 1}, OK)
	j.Settle(r.now)
	r.now = r.now.Add(31 * time.Minute)
	j.Settle(r.now)
	if room := j.Room(r.now); j.Stage != 1 || room.fresh != 4 {
		t.Errorf("stage %d opens %d", j.Stage, room.fresh)
	}
}

// A device counts once for the stop rule, and what became of it in the end is what counts.
func TestHarmCountsOnce(t *testing.T) {
	r := newRolled(t, func(s *api.JobSpec) { s.Stop = &api.JobStop{Failed: 3} })
	r.do("call", "check", "get", "all", "check")
	if r.job.Harmed != 1 || r.job.State != Running {
		t.Fatalf("harmed %d, %s", r.job.Harmed, r.job.State)
	}
	r.do("wait 11m", "check", "get", "all", "new", "connect", "pass tools", "pass status", "wait 11m", "expire")
	if r.job.Harmed != 0 || r.outcome() != "ok" {
		t.Errorf("harmed %d, %s", r.job.Harmed, r.outcome())
	}
}

func TestTwoLostAstray(t *testing.T) {
	r := newRolled(t, func(s *api.JobSpec) { s.Stop = &api.JobStop{Failed: 100} })
	r.job.Astray = 1
	r.do("check foreign", "get", "all", "wait 16m", "expire")
	if got := r.outcome(); got != "failed lost, halted astray" {
		t.Error(got)
	}
}

// A device that came back after all is not one that was lost.
func TestAstrayIsCorrected(t *testing.T) {
	r := newRolled(t, func(s *api.JobSpec) { s.Stop = &api.JobStop{Failed: 100} })
	r.do("check foreign", "get", "all", "wait 16m", "expire")
	if r.job.Astray != 1 {
		t.Fatalf("%d are lost", r.job.Astray)
	}
	if r.do("correct"); r.job.Astray != 0 || r.outcome() != "ok" {
		t.Errorf("%d are lost, %s", r.job.Astray, r.outcome())
	}
}

func TestFirmwareSpec(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	image := strings.Repeat("a", 64)
	spec := api.JobSpec{Select: "device=*", Action: api.JobAction{Firmware: &api.JobFirmware{Image: image}}}
	if err := Check(&spec, time.UTC, now); err != nil {
		t.Fatal(err)
	}
	f := spec.Action.Firmware
	if f.Restart != "idle" || f.Stay != "10m" || len(f.Gates) != 5 || f.OnHalt != "stop" || len(spec.Stages) != 3 || spec.Stages[0].Stop.Failed != 1 || spec.Stop.Share != "5%" || spec.Stop.Of != 20 ||
		spec.Pace.Concurrency != 10 || spec.When.Until.Sub(now) != MaxUntil {
		t.Errorf("%+v %+v", f, spec)
	}
	staged := api.JobSpec{Select: "device=*", Action: api.JobAction{Firmware: &api.JobFirmware{Image: image}}, Stages: []api.JobStage{{OK: api.Amount{Number: 3}}}}
	if err := Check(&staged, time.UTC, now); err != nil || staged.Stages[0].Stop == nil || staged.Stages[0].Stop.Failed != 1 {
		t.Errorf("%+v, %v", staged.Stages, err)
	}
	staged.Stages[0].Stop, staged.Stop = nil, &api.JobStop{Failed: 4}
	if err := Check(&staged, time.UTC, now); err != nil || staged.Stages[0].Stop != nil {
		t.Errorf("%+v, %v", staged.Stages, err)
	}
	for at, edit := range map[string]func(*api.JobSpec){
		"/action/firmware/image":   func(s *api.JobSpec) { s.Action.Firmware.Image = "" },
		"/action/firmware/restart": func(s *api.JobSpec) { s.Action.Firmware.Restart = "now" },
		"/action/firmware/gates":   func(s *api.JobSpec) { s.Action.Firmware.Gates = []string{"smile"} },
		"/action/firmware/allow":   func(s *api.JobSpec) { s.Action.Firmware.Allow = []string{"chip"} },
		"/action/firmware/stay":    func(s *api.JobSpec) { s.Action.Firmware.Stay = "forever" },
		"/when/cron":               func(s *api.JobSpec) { s.When = &api.JobWhen{Cron: "* * * * *"} },
		"/retry":                   func(s *api.JobSpec) { s.Retry = &api.JobRetry{Failed: 1} },
		"/stages/0/stop":           func(s *api.JobSpec) { s.Stages = []api.JobStage{{OK: api.Amount{Number: 1}, Stop: &api.JobStop{}}} },
	} {
		spec := api.JobSpec{Select: "device=*", Action: api.JobAction{Firmware: &api.JobFirmware{Image: image}}}
		edit(&spec)
		err := devices.AsError(Check(&spec, time.UTC, now))
		if !strings.Contains(fmt.Sprint(err.Faults), at) {
			t.Errorf("%s: %v", at, err)
		}
	}
}

// Places of a stage are for devices that can be proved up to their tools, as long as there are any.
func TestStagesAreProvable(t *testing.T) {
	r := newRolled(t, func(s *api.JobSpec) {
		s.Pace = &api.JobPace{Rate: RateUnlimited, Concurrency: 100}
		s.Stages = []api.JobStage{{OK: api.Amount{Number: 1}}, {OK: api.Amount{Number: 4}}, {OK: api.Amount{Percent: 100}}}
	})
	j := &r.job
	j.State, j.RoundN, j.Counts = Preparing, 0, Counts{}
	j.Added(8, nil, 3)
	j.Prepared(r.now)
	task := func(provable bool) *Step {
		return &Step{Job: j, Task: &Task{State: TaskWaiting, Rollout: &Rollout{Provable: provable}}, Now: r.now}
	}
	begins := func(when string, provable, want bool) *Step {
		t.Helper()
		s := task(provable)
		if got := s.MayBegin(true); got != want {
			t.Fatalf("%s: one that can be proved (%t) begins: %t", when, provable, got)
		}
		if gate := j.GateOf(s.Task, r.now); (gate == WaitStage) == want {
			t.Errorf("%s: %q", when, gate)
		}
		if want {
			s.begin()
		}
		return s
	}
	passes := func(s *Step) {
		s.end(OK, "", "")
		j.Settle(r.now)
	}
	begins("the first stage", false, false)
	passes(begins("the first stage", true, true))
	if j.Stage != 1 || j.Provable != 2 {
		t.Fatalf("stage %d, %d can be proved", j.Stage, j.Provable)
	}
	begins("three places for two that can be proved", false, true)
	begins("two places for two that can be proved", false, false)
	undone := begins("two places for two that can be proved", true, true)
	begins("one place for one that can be proved", false, false)
	undone.Call()
	undone.NotCalled(r.now)
	if j.Provable != 2 {
		t.Errorf("after a restart that was not sent, %d can be proved", j.Provable)
	}
	gone := task(true)
	gone.Refuse("no", "no")
	begins("two places for one that can be proved", false, true)
	begins("one place for one that can be proved", false, false)
	task(true).Refuse("no", "no")
	begins("one place and none that can be proved", false, true)
}
