package firmware

import (
	"fmt"
	"strings"
	"time"
)

// Away is when devices are without power: For out of every Every, each device at its own time.
type Away struct{ For, Every time.Duration }

// parseAway reads a text such as 30s/2m; empty: no absences.
func parseAway(text string) (a Away, err error) {
	if text == "" {
		return a, nil
	}
	lasts, every, _ := strings.Cut(text, "/")
	if a.For, err = time.ParseDuration(lasts); err == nil {
		a.Every, err = time.ParseDuration(every)
	}
	if err != nil || a.For <= 0 || a.Every <= a.For {
		return a, fmt.Errorf("%q is not an absence and a longer period, such as 30s/2m", text)
	}
	return a, nil
}

// armAway starts the absences of --away. Devices go one after the other, spread over the period.
func (d *Device) armAway() {
	if a := d.fleet.options.Away; a.Every > 0 {
		n := time.Duration(len(d.fleet.devices))
		d.fleet.after(a.Every*time.Duration(d.index+1)/n, d.leave)
	}
}

// leave ends the power until the device returns. A device that boots or has come to an end keeps it this time.
func (d *Device) leave() {
	a := d.fleet.options.Away
	d.fleet.after(a.Every, d.leave)
	d.mu.Lock()
	if d.stopped || d.life == StateBooting || d.life == StateWaiting {
		d.mu.Unlock()
		return
	}
	drop := d.powerOffLocked()
	d.setLifeLocked(StateAway, "")
	d.away = true
	d.stats.absences++
	d.mu.Unlock()
	drop()
	d.fleet.after(a.For, func() {
		d.mu.Lock()
		d.away = false
		d.mu.Unlock()
		d.fleet.spawn(d.boot)
	})
}
