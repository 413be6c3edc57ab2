package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/backup"
	"fleetd/internal/cleantext"
	"fleetd/internal/config"
)

type backupCmd struct {
	Output   string  `short:"o" required:"" help:"File to write, or a directory, where the file gets a name with the time; DIR/ is made if need be." placeholder:"FILE|DIR"`
	DataDir  *string `help:"Data directory of the node ($FLEETD_DATA_DIR)." placeholder:"./fleetd-data"`
	Database *string `help:"The node's database, if it is not the one in the data directory ($FLEETD_DATABASE)." placeholder:"URL"`
	Streams  bool    `help:"Also events and photos of the embedded NATS; the node must be stopped."`
}

// Run writes one archive and prints what is in it, and what is not.
func (b *backupCmd) Run(ctx context.Context, a *app) error {
	given := make(map[string]string)
	for name, value := range map[string]*string{"data-dir": b.DataDir, "database": b.Database} {
		if value != nil {
			given[name] = *value
		}
	}
	cfg, err := config.Load(given, a.environ)
	if err != nil {
		return exitError{err, exitFailed}
	}
	cfg.Version = currentBuild().version
	r, err := backup.Backup(ctx, cfg, b.Output, b.Streams)
	if err != nil {
		return exitError{err, exitFailed}
	}
	of := "a node that is not running"
	if r.Node != "" {
		of = "running node " + r.Node
	}
	fmt.Fprintf(a.stdout, "Backup of %s: %s, %s, %s.\n", of, r.Path, sizeText(r.Size), count(r.Files, "file"))
	for _, sentence := range r.Without {
		fmt.Fprintln(a.stdout, sentence)
	}
	fmt.Fprintln(a.stdout, "Keep it where nobody else can read it: anyone who has it can command the fleet's devices.")
	return nil
}

type restoreCmd struct {
	File    string `arg:"" help:"Backup made by fleetd backup." placeholder:"FILE"`
	DataDir string `help:"Directory to restore into ($FLEETD_DATA_DIR)." placeholder:"./fleetd-data"`
	Force   bool   `help:"Replace what is in the directory already."`
	Keep    bool   `name:"keep-schedules" help:"For a planned move: the former node was stopped before the backup was made, so schedules go on. Other open jobs are halted, as without it."`
}

// Run checks the archive, writes its files and prints what is left to do.
func (r *restoreCmd) Run(a *app) error {
	dir := config.LoadClient(config.Client{DataDir: r.DataDir}, a.environ).DataDir
	report, err := backup.Restore(r.File, dir, r.Force, r.Keep)
	if err != nil {
		return exitError{err, exitFailed}
	}
	fmt.Fprintf(a.stdout, "Restored %s into %s, from a backup of %s by fleetd %s.\n",
		count(report.Files, "file"), dir, report.Created.Format(time.RFC3339), cleantext.Line(report.Version))
	for _, sentence := range report.Without {
		fmt.Fprintln(a.stdout, sentence)
	}
	for _, sentence := range haltedText(report.Halted) {
		fmt.Fprintln(a.stdout, sentence)
	}
	fmt.Fprintln(a.stdout, "Start it with: fleetd serve --data-dir "+dir)
	return nil
}

// haltedText says what became of the open jobs of a restored database.
func haltedText(h backup.Halted) (sentences []string) {
	if h.Jobs > 0 {
		of := ""
		if h.Schedules > 0 {
			of = ", of which " + count(h.Schedules, "schedule") + " (no time comes for a halted one)"
		}
		sentences = append(sentences, fmt.Sprintf("Halted: %s%s, since what ran after the backup must not run again. fleetd jobs --state halted shows them, fleetd jobs resume JOB continues one.",
			count(h.Jobs, "open job"), of))
	}
	if h.Kept > 0 {
		sentences = append(sentences, fmt.Sprintf("Kept: %s.", count(h.Kept, "schedule")))
	}
	return sentences
}

// count writes a number with its noun.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}

// sizeText writes bytes for people.
func sizeText(n int64) string {
	units := []string{"bytes", "KiB", "MiB", "GiB"}
	size := float64(n)
	i := 0
	for ; size >= 1024 && i < len(units)-1; i++ {
		size /= 1024
	}
	return strings.TrimSuffix(strconv.FormatFloat(size, 'f', 1, 64), ".0") + " " + units[i]
}
