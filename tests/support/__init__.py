"""What tests share: ranks, models, trainers, programs that ranks run."""
