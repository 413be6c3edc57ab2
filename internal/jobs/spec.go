package jobs

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/selector"
	"fleetd/internal/timespan"
)

// ParseNew reads the body of a new job. Unknown members are errors.
func ParseNew(body []byte) (spec api.NewJob, err error) {
	if len(body) > maxSpecBytes {
		return spec, devices.Errorf(devices.CodeTooLarge, "a job may have %d KiB", maxSpecBytes>>10)
	}
	read := json.NewDecoder(bytes.NewReader(body))
	read.DisallowUnknownFields()
	if err := read.Decode(&spec); err != nil {
		return spec, devices.Errorf(devices.CodeBadRequest, "the job is not valid JSON of this form: %v; see docs/jobs.md", err)
	}
	if read.More() {
		return spec, devices.Errorf(devices.CodeBadRequest, "text follows the job; send one object")
	}
	return spec, nil
}

// HashOf returns the digest of a job or a rollout as given, in hex, by which a repeated request is recognized.
func HashOf(spec any) string {
	text, err := json.Marshal(spec)
	if err != nil {
		panic("jobs: " + err.Error()) // every member was decoded from JSON
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// IsKey reports whether a text can be an Idempotency-Key: 1 to 128 printable ASCII characters.
func IsKey(text string) bool {
	return text != "" && len(text) <= maxKey && !strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r > '~' })
}

// faults collects what is wrong with a spec.
type faults []devices.Fault

func (f *faults) add(pointer, format string, args ...any) {
	*f = append(*f, devices.Fault{Pointer: pointer, Detail: fmt.Sprintf(format, args...)})
}

// Check checks a job as given, and fills in defaults. zone is the fleet's timezone. The error
// is CodeInvalidArguments with all faults, or CodeBadRequest for a select that cannot be read.
func Check(spec *api.JobSpec, zone *time.Location, now time.Time) error {
	if _, err := selector.Parse(spec.Select); err != nil { // as wherever a select is given
		return devices.Errorf(devices.CodeBadRequest, "select: %v", err)
	}
	var f faults
	checkAction(spec, &f)
	checkSelection(spec, &f)
	checkWhen(spec, zone, now, &f)
	limitTogether(spec)
	CheckPace(&spec.Pace, "/pace", &f)
	for i := range spec.Stages {
		s := &spec.Stages[i]
		at := "/stages/" + strconv.Itoa(i)
		if s.OK == (api.Amount{}) {
			f.add(at+"/ok", "is missing; write a number, or a share such as 5%%")
		}
		span(s.Soak, at+"/soak", 0, MaxUntil, &f)
		CheckStop(s.Stop, at+"/stop", &f)
	}
	CheckStop(spec.Stop, "/stop", &f)
	if r := spec.Retry; r != nil {
		if r.Failed < 0 || r.Failed > 10 {
			f.add("/retry/failed", "must be 0 to 10")
		}
		span(r.After, "/retry/after", 0, MaxUntil, &f)
	}
	if spec.Busy != "" && spec.Busy != "wait" && spec.Busy != "skip" {
		f.add("/busy", "must be wait or skip")
	}
	if len(spec.Note) > 1000 {
		f.add("/note", "may have 1,000 bytes")
	}
	return f.err()
}

func (f faults) err() error {
	if len(f) == 0 {
		return nil
	}
	return &devices.Error{Code: devices.CodeInvalidArguments, Detail: "the job is not valid: " + f[0].Pointer + " " + f[0].Detail, Faults: f}
}

func checkSelection(spec *api.JobSpec, f *faults) {
	if (spec.Select == "") == (len(spec.Devices) == 0) {
		f.add("/select", "give either select (device=* selects all) or devices")
		return
	}
	if len(spec.Devices) > MaxDevices {
		f.add("/devices", "names %d devices, and may name %d; use select", len(spec.Devices), MaxDevices)
	}
	known := map[devices.ID]bool{}
	var list []string
	for i, text := range spec.Devices {
		id, err := devices.ParseID(text)
		if err != nil {
			f.add("/devices/"+strconv.Itoa(i), "%v", err)
		}
		if !known[id] {
			list = append(list, string(id))
		}
		known[id] = true
	}
	spec.Devices = list
	if spec.Follow && len(list) > 0 {
		f.add("/follow", "needs select: named devices cannot become more")
	}
}

func checkWhen(spec *api.JobSpec, zone *time.Location, now time.Time, f *faults) {
	if spec.When == nil {
		spec.When = &api.JobWhen{}
	}
	w := spec.When
	if w.Timezone != "" {
		named, err := time.LoadLocation(w.Timezone)
		if err != nil || w.Timezone == "Local" {
			f.add("/when/timezone", "is not the name of a timezone, such as Europe/Berlin")
			return
		}
		zone = named
	} else if w.Cron != "" || w.Window != nil {
		w.Timezone = zone.String()
	}
	start := now
	if !w.At.IsZero() {
		if start = w.At.Time; start.Before(now) {
			start = now
		}
		if start.Sub(now) > MaxStanding {
			f.add("/when/at", "is more than ten years ahead")
		}
	}
	lasting := w.Cron != "" || spec.Follow
	if w.Cron != "" {
		if _, err := ParseSchedule(w.Cron, zone, now); err != nil {
			f.add("/when/cron", "%v", err)
		}
		if spec.Follow {
			f.add("/follow", "cannot be combined with when.cron: each round selects anew")
		}
		if len(spec.Stages) > 0 {
			f.add("/stages", "cannot be combined with when.cron")
		}
	}
	if win := w.Window; win != nil {
		if _, err := ParseSchedule(win.Cron, zone, now); err != nil {
			f.add("/when/window/cron", "%v", err)
		}
		if win.For == "" {
			f.add("/when/window/for", "is missing; write how long the window is open, such as 3h")
		}
		span(win.For, "/when/window/for", time.Minute, 7*24*time.Hour, f)
	}
	most := MaxUntil
	if lasting {
		most = MaxStanding
	}
	switch {
	case w.Until.IsZero() && lasting:
		w.Until = api.At(now.Add(MaxStanding))
	case w.Until.IsZero() && spec.Action.Firmware != nil:
		w.Until = api.At(start.Add(MaxUntil))
	case w.Until.IsZero():
		w.Until = api.At(start.Add(DefaultUntil))
	case !w.Until.After(start):
		f.add("/when/until", "must be after now, and after when.at")
	case w.Until.Sub(start) > most:
		f.add("/when/until", "may be at most %d days ahead", int(most/(24*time.Hour)))
	}
}

// limitTogether has a job that halts at so many failures begin no more than that at once, if it does not say how many.
func limitTogether(spec *api.JobSpec) {
	if spec.Stop == nil || spec.Stop.Failed <= 0 || spec.Stop.Failed >= DefaultTogether || spec.Pace != nil && spec.Pace.Concurrency != 0 {
		return
	}
	pace := api.JobPace{Concurrency: spec.Stop.Failed}
	if spec.Pace != nil {
		pace.Rate = spec.Pace.Rate
	}
	spec.Pace = &pace
}

// CheckPace checks a pace and fills in its defaults.
func CheckPace(p **api.JobPace, at string, f *faults) {
	if *p == nil {
		*p = &api.JobPace{}
	}
	pace := *p
	pace.Rate = cmp.Or(pace.Rate, DefaultRate)
	if _, err := ParseRate(pace.Rate); err != nil {
		f.add(at+"/rate", "%v", err)
	}
	switch {
	case pace.Concurrency == 0:
		pace.Concurrency = DefaultTogether
	case pace.Concurrency < 0 || pace.Concurrency > 100_000:
		f.add(at+"/concurrency", "must be 1 to 100,000")
	}
}

// CheckStop checks a stop rule and fills in its defaults.
func CheckStop(s *api.JobStop, at string, f *faults) {
	if s == nil {
		return
	}
	if s.Failed < 0 {
		f.add(at+"/failed", "must not be negative")
	}
	if s.Of < 0 {
		f.add(at+"/of", "must not be negative")
	}
	if s.Share != "" {
		if share, err := api.ParseAmount(s.Share); err != nil || share.Percent == 0 {
			f.add(at+"/share", "must be a share such as 5%%")
		}
		s.Of = cmp.Or(s.Of, DefaultShareOf)
	}
	if s.Failed == 0 && s.Share == "" {
		f.add(at, "needs failed or share")
	}
}

// CheckEdit checks a change of an open job, and fills in defaults.
func CheckEdit(e *api.JobEdit, j *Job, now time.Time) error {
	var f faults
	if e.Pace != nil {
		CheckPace(&e.Pace, "/pace", &f)
	}
	CheckStop(e.Stop, "/stop", &f)
	if e.Until != nil {
		most := MaxUntil
		if j.Standing() {
			most = MaxStanding
		}
		if !e.Until.After(now) || e.Until.Sub(now) > most {
			f.add("/until", "must be after now, and at most %d days ahead", int(most/(24*time.Hour)))
		}
	}
	if e.Note != nil && len(*e.Note) > 1000 {
		f.add("/note", "may have 1,000 bytes")
	}
	return f.err()
}

// span checks a duration that may be empty.
func span(text, at string, least, most time.Duration, f *faults) {
	if text == "" {
		return
	}
	if d, err := timespan.Parse(text); err != nil || d < least || d > most {
		f.add(at, "must be a duration from %s to %s, such as 10m", timespan.Format(least), timespan.Format(most))
	}
}

// durationOf returns a duration that was checked; empty is the default.
func durationOf(text string, otherwise time.Duration) time.Duration {
	if d, err := timespan.Parse(text); text != "" && err == nil {
		return d
	}
	return otherwise
}

// Rate is a number of tasks per time. The zero value is unlimited.
type Rate struct {
	Interval time.Duration // between two tasks on average
	Burst    int64         // one second's worth, at least 1
}

// ParseRate parses 20/s, 30/m, 100/h or unlimited.
func ParseRate(text string) (Rate, error) {
	if text == RateUnlimited {
		return Rate{}, nil
	}
	number, per, ok := strings.Cut(text, "/")
	units := map[string]time.Duration{"s": time.Second, "m": time.Minute, "h": time.Hour}
	n, err := strconv.Atoi(number)
	if !ok || err != nil || n < 1 || n > 100_000 || units[per] == 0 {
		return Rate{}, fmt.Errorf("must be a number per s, m or h, such as 30/m, or %s", RateUnlimited)
	}
	interval := units[per] / time.Duration(n)
	return Rate{Interval: interval, Burst: int64(math.Max(1, float64(time.Second)/float64(interval)))}, nil
}
