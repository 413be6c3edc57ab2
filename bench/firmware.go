package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"runtime"
	"slices"
	"time"

	"fleetd/bench/load"
	"fleetd/internal/api"
	"fleetd/simulator/firmware"
)

const (
	firmwareAddresses = 8
	firmwareEach      = 8       // devices of an address, as many as may download at once
	firmwareRate      = 100_000 // bytes per second that a device takes
	firmwareTick      = 100 * time.Millisecond
	firmwarePiece     = int64(firmwareRate * firmwareTick / time.Second)
	firmwareDownloads = firmwareAddresses * firmwareEach
	firmwareBoard     = "bread-compact-wifi" // of the devices of this program
	firmwareSpread    = 5 * time.Second      // in which the downloads begin: the node writes down every 5 s how far each has come
	firmwareVersion   = "9.9.9"
)

// Figures of firmware.
const (
	figureLoadingCPU = "CPU of the node, % of one core; baseline: the calls alone"
	figureTaken      = "KB/s of a download"
	figureTakenLeast = "KB/s of the slowest download"
	figureCheckTail  = "p99 of an OTA check, µs"
	figureCheckHalf  = "p50 of an OTA check, µs"
	figureCheckCPU   = "CPU of the node per check, µs"
	figureOffers     = "checks that got an offer"
)

var downloadLines = []line{
	{name: figureLoadingCPU, precision: 1, goal: &goal{atMost, 50}}, {name: figureBeside, goal: &goal{ratioAtMost, 1.3}}, {name: figureMedBeside},
	{name: figureTaken, precision: 1}, {name: figureTakenLeast, precision: 1},
}

// crowded is before the names of figures of a rollout whose pace permits more offers than there are places, so that every check is judged.
const crowded = "no place left: "

var checkLines = []line{
	{name: figureCheckTail, goal: &goal{ratioAtMost, 1.5}}, {name: figureCheckHalf}, {name: figureCheckCPU}, {name: figureOffers},
	{name: crowded + figureCheckTail, goal: &goal{ratioAtMost, 1.5}}, {name: crowded + figureCheckHalf}, {name: crowded + figureCheckCPU}, {name: crowded + figureOffers},
}

// checkSides are what is measured in a run: the marks of the figures, and the pace of the rollout; nil: no rollout.
var checkSides = []struct {
	mark string
	pace *api.JobPace
}{{mark: baselineMark}, {pace: &api.JobPace{}}, {mark: crowded, pace: &api.JobPace{Rate: "unlimited", Concurrency: 10_000}}}

var checkVariants = []variant{
	{name: "firmware-checks-sqlite", title: "SQLite"},
	{name: "firmware-checks-postgres", title: "Postgres", postgres: true},
}

// measureFirmware measures calls beside devices that download an image slowly, and OTA checks during a rollout.
func (b *bench) measureFirmware(ctx context.Context) error {
	o := b.opt
	m := measurement{Name: "firmware-downloads", Title: fmt.Sprintf("%d downloads of %d KB/s from %d addresses for %v, all embedded; calls to %d devices, %d per second, evenly",
		firmwareDownloads, firmwareRate/1000, firmwareAddresses, o.firmwareTime, o.devices, o.idleRate), Baseline: "the same calls without downloads"}
	if err := b.inPairs(&m, downloadLines, figureBeside, func(run int, into samples) error { return b.downloadsRun(ctx, run, into) }); err != nil {
		return err
	}
	for _, v := range checkVariants {
		if v.postgres && b.postgres == nil {
			b.leaveOut(v.name + ": no Postgres")
			continue
		}
		m := measurement{Name: v.name, Title: fmt.Sprintf("OTA checks of %d devices in %v with a rollout to all of them, on %s", o.firmwareDevices, o.firmwareTime, v.title), Baseline: "the same checks without a rollout"}
		if err := b.inPairs(&m, checkLines, figureCheckTail, func(run int, into samples) error { return b.checksRun(ctx, run, v, into) }); err != nil {
			return err
		}
	}
	return nil
}

// inPairs makes the runs of a measurement that measure both sides, and adds its table.
func (b *bench) inPairs(m *measurement, lines []line, figure string, once func(run int, into samples) error) error {
	fleetd, baseline := samples{}, samples{}
	for run := range b.opt.runs {
		both := samples{}
		if err := b.quietly(m.Name, both, func(into samples) error { return once(run, into) }); err != nil {
			return fmt.Errorf("%s, run %d: %w", m.Name, run+1, err)
		}
		fleetd.merge(baseline, both)
		b.progress(m.Name, run, fleetd, baseline, figure)
	}
	m.tabulate(fleetd, baseline, lines)
	b.add(*m)
	return nil
}

// downloadsRun measures calls, and the same calls beside downloads, in an order that changes with the run.
func (b *bench) downloadsRun(ctx context.Context, run int, into samples) (err error) {
	called := b.opt.devices
	d, f, end, err := b.stage(ctx, variant{}, overWebSocket, called+firmwareDownloads, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	if err := f.bring(ctx, d, 0, called); err != nil {
		return err
	}
	defer b.beFirst(ctx, "firmware-downloads", &err)()
	for step := range 2 {
		if (run+step)%2 == 0 {
			err = b.callsWhile(ctx, d, called, "", baselineMark, into)
		} else {
			err = b.callsBesideDownloads(ctx, d, f, b.profileFile("firmware-downloads", run), into)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// callsWhile makes calls at a fixed rate for -firmware-time.
func (b *bench) callsWhile(ctx context.Context, d *daemon, called int, profile, mark string, into samples) error {
	saved := d.profile(ctx, profile, max(1, int(b.opt.firmwareTime.Seconds())))
	meter, err := startMeter("", d.pid())
	if err != nil {
		return err
	}
	long := *b
	long.opt.duration = b.opt.firmwareTime
	l, err := long.paced(ctx, d.target(), called, b.opt.idleRate)
	if err != nil {
		return err
	}
	s, err := meter.stop(runtime.NumCPU())
	if err := errors.Join(err, saved()); err != nil {
		return err
	}
	into.add(mark+figureLoadingCPU, s.daemon.Seconds()/s.wall.Seconds()*100)
	into.add(mark+figureBeside, load.Quantile(l.sent, 0.99).Seconds()*1e6)
	into.add(mark+figureMedBeside, load.Quantile(l.sent, 0.5).Seconds()*1e6)
	into.raise(figureOthers, s.others*100)
	return nil
}

// callsBesideDownloads makes the same calls while the last devices of the fleet, which are not connected, download an image.
func (b *bench) callsBesideDownloads(ctx context.Context, d *daemon, f *fleet, profile string, into samples) error {
	first := len(f.logins) - firmwareDownloads
	var ids []string
	for i := range firmwareDownloads {
		ids = append(ids, load.DeviceID(first+i))
	}
	spread := min(firmwareSpread, b.opt.firmwareTime)
	size := int(firmwareRate * (b.opt.firmwareTime + spread) / time.Second)
	if err := d.roll(ctx, size, api.JobSpec{Devices: ids, Pace: &api.JobPace{Rate: "unlimited", Concurrency: firmwareDownloads}}, firmwareDownloads); err != nil {
		return err
	}
	images := make([]string, firmwareDownloads)
	for i := range images {
		var err error
		if images[i], err = f.checkFrom(ctx, i/firmwareEach*load.PerAddress, first+i); err != nil {
			return err
		}
		if images[i] == "" {
			return fmt.Errorf("device %s got no offer", ids[i])
		}
	}
	rates := make([]float64, firmwareDownloads)
	loaded := make(chan error, 1)
	go func() {
		loaded <- load.InParallel(firmwareDownloads, firmwareDownloads, func() (func(i int) error, func(), error) {
			return func(i int) (err error) {
				rates[i], err = download(ctx, images[i], i, spread)
				return err
			}, func() {}, nil
		})
	}()
	if err := errors.Join(rest(ctx, spread), b.callsWhile(ctx, d, first, profile, "", into), <-loaded); err != nil {
		return err
	}
	slices.Sort(rates)
	into.add(figureTaken, rates[len(rates)/2])
	into.add(figureTakenLeast, rates[0])
	return nil
}

// roll adds an image of about size bytes, rolls it out to devices at their next check, and waits until all n have a task.
func (d *daemon) roll(ctx context.Context, size int, spec api.JobSpec, n int) error {
	profiles, err := firmware.ParseProfiles("fw-2.4")
	if err != nil {
		return err
	}
	profiles[0].ImageSize = size
	var added api.AddedFirmware
	if err := d.sendContent(ctx, http.MethodPost, "/v1/firmware", "application/octet-stream", profiles[0].Image(firmwareVersion, "http://"+d.device+"/xiaozhi/ota/"), &added); err != nil {
		return err
	}
	image := added.Items[0].ID
	if err := d.send(ctx, http.MethodPatch, "/v1/firmware/"+image, api.FirmwareEdit{Boards: &[]string{firmwareBoard}}, nil); err != nil {
		return err
	}
	spec.Action.Firmware = &api.JobFirmware{Image: image, FirmwareOptions: api.FirmwareOptions{Restart: "never"}}
	spec.Stages = []api.JobStage{{OK: api.Amount{Percent: 100}}}
	var j api.Job
	if err := d.send(ctx, http.MethodPost, "/v1/jobs", api.NewJob{JobSpec: spec}, &j); err != nil {
		return err
	}
	return d.awaitJobs(ctx, []string{j.ID}, func(j *api.Job) bool { return j.State == "running" && j.Counts.Waiting == int64(n) })
}

// checkFrom makes the OTA check of device i on a connection of its own from the address of a client.
func (f *fleet) checkFrom(ctx context.Context, client, i int) (image string, err error) {
	c, err := f.dial(ctx, f.address, client)
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }() // it served its purpose
	return f.check(c, bufio.NewReaderSize(c, 8192), i)
}

// download takes an image as slowly as a device, and returns how many KB/s it took. Download number i has its address, and begins at its part
// of spread.
func download(ctx context.Context, image string, i int, spread time.Duration) (rate float64, err error) {
	u, err := url.Parse(image)
	if err != nil {
		return 0, err
	}
	c, err := load.DialNarrow(ctx, u.Host, i/firmwareEach*load.PerAddress)
	if err != nil {
		return 0, err
	}
	defer func() { _ = c.Close() }() // everything was read
	if err := errors.Join(rest(ctx, spread*time.Duration(i)/firmwareDownloads), c.SetDeadline(time.Now().Add(2*time.Minute))); err != nil {
		return 0, err
	}
	begun := time.Now()
	if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: bench\r\n\r\n", u.Path); err != nil {
		return 0, err
	}
	r, err := http.ReadResponse(bufio.NewReaderSize(c, 1024), nil)
	if err != nil {
		return 0, err
	}
	if r.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("download: %s", r.Status)
	}
	for left := r.ContentLength; left > 0; left -= firmwarePiece {
		if _, err := io.CopyN(io.Discard, r.Body, min(firmwarePiece, left)); err != nil {
			return 0, fmt.Errorf("download: %d of %d bytes are left: %w", left, r.ContentLength, err)
		}
		taken := r.ContentLength - left + firmwarePiece
		if err := rest(ctx, time.Until(begun.Add(time.Duration(taken)*time.Second/firmwareRate))); err != nil {
			return 0, err
		}
	}
	return float64(r.ContentLength) / 1000 / time.Since(begun).Seconds(), nil
}

// checksRun measures checks without a rollout and with those of checkSides, each on a new node, in an order that changes with the run.
func (b *bench) checksRun(ctx context.Context, run int, v variant, into samples) error {
	for i := range checkSides {
		side := checkSides[(run+i)%len(checkSides)]
		if err := b.checksOn(ctx, v, run, side.mark, side.pace, into); err != nil {
			return err
		}
	}
	for _, figure := range []string{figureCheckTail, figureCheckHalf, figureCheckCPU} {
		into.add(baselineMark+crowded+figure, into[baselineMark+figure][0])
	}
	return nil
}

// checksOn measures checks of known devices, each on a connection of its own, as after a start.
func (b *bench) checksOn(ctx context.Context, v variant, run int, mark string, pace *api.JobPace, into samples) (err error) {
	n := b.opt.firmwareDevices
	d, f, end, err := b.stage(ctx, v, overWebSocket, n, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	if err := d.awaitQuiet(ctx, startLimit); err != nil {
		return err
	}
	if pace != nil {
		if err := d.roll(ctx, 0, api.JobSpec{Select: everything, Pace: pace}, n); err != nil {
			return err
		}
	}
	defer b.beFirst(ctx, v.name, &err)()
	if err := errors.Join(d.collect(ctx), rest(ctx, b.opt.settle)); err != nil {
		return err
	}
	saved := d.profile(ctx, b.profileFile(v.name+map[string]string{baselineMark: "-before", crowded: "-crowded"}[mark], run), max(1, int(b.opt.firmwareTime.Seconds())))
	meter, err := startMeter("", d.pid())
	if err != nil {
		return err
	}
	images := make([]string, n)
	rate := max(1, int(float64(n)/b.opt.firmwareTime.Seconds()))
	l, err := evenly(ctx, b.opt.callers, n, rate, func() (func(i int) error, func(), error) {
		return func(i int) (err error) {
			images[i], err = f.checkFrom(ctx, i%firmwareAddresses*load.PerAddress, i)
			return err
		}, func() {}, nil
	})
	if err != nil {
		return err
	}
	s, err := meter.stop(runtime.NumCPU())
	if err := errors.Join(err, saved()); err != nil {
		return err
	}
	offers := len(slices.DeleteFunc(images, func(image string) bool { return image == "" }))
	into.add(mark+figureCheckTail, load.Quantile(l.sent, 0.99).Seconds()*1e6)
	into.add(mark+figureCheckHalf, load.Quantile(l.sent, 0.5).Seconds()*1e6)
	into.add(mark+figureCheckCPU, s.daemon.Seconds()*1e6/float64(n))
	into.add(mark+figureOffers, float64(offers))
	into.raise(figureOthers, s.others*100)
	return nil
}
